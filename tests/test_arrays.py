"""Arrays in and out on the host: NumPy in every guise, hand-made DLPack producers, out=."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.dlpack_producer import CUDA, CUDA_HOST, CUDA_MANAGED, READ_ONLY, Producer, values_of
from tests.strategies import DTYPES
from tests.tolerance import assert_same_bits, assert_within_contract

N, K = 24, 64
B, SCALES = reference.make(N, K, 41)
dtypes = pytest.mark.parametrize("dtype", sorted(DTYPES))
both_versions = pytest.mark.parametrize("versioned", [False, True], ids=["legacy", "versioned"])


@pytest.fixture
def layer() -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(B, SCALES, 0.125)


def some_x(dtype: str = "float16", m: int = 5) -> NDArray:
    return reference.x_of(m, K, 42).astype(DTYPES[dtype])


def right(x: NDArray) -> reference.Expected:
    return reference.linear(x, B, SCALES, 0.125)


# NumPy


@dtypes
def test_numpy_in_numpy_out(layer: fp4linear.Fp4Linear, dtype: str) -> None:
    x = some_x(dtype)
    y = layer.forward(x)
    assert type(y) is np.ndarray and y.dtype == DTYPES[dtype] and y.flags.c_contiguous
    assert_within_contract(y, right(x))


@dtypes
def test_read_only_sources_work_and_stay_unchanged(dtype: str) -> None:
    b, scales, x = B.copy(), SCALES.copy(), some_x(dtype)
    for array in (b, scales, x):
        array.flags.writeable = False
    y = fp4linear.Fp4Linear(b, scales, 0.125).forward(x)
    assert_within_contract(y, right(x))
    assert_same_bits(b, B)
    assert_same_bits(scales, SCALES)
    assert_same_bits(x, some_x(dtype))


def test_memory_maps(tmp_path: Path) -> None:
    maps = {}
    for name, array in (("b", B), ("scales", SCALES), ("x", some_x())):
        array.tofile(tmp_path / name)
        maps[name] = np.memmap(tmp_path / name, array.dtype, "r", shape=array.shape)
    y = fp4linear.Fp4Linear(maps["b"], maps["scales"], 0.125).forward(maps["x"])
    assert_within_contract(np.asarray(y), right(some_x()))


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 7])
def test_arrays_over_bytes_at_any_address(offset: int) -> None:
    def held(array: NDArray) -> NDArray:
        return np.frombuffer(b"\xff" * offset + array.tobytes() + b"\xff", array.dtype, array.size, offset).reshape(
            array.shape
        )

    for dtype in ("float16", "float32"):
        x = held(some_x(dtype))
        y = fp4linear.Fp4Linear(held(B), held(SCALES), 0.125).forward(x)
        assert_within_contract(y, right(some_x(dtype)))


@pytest.mark.parametrize("scale_dtype", [np.uint8, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("b_dtype", [np.uint8, np.int8])
def test_types_of_the_weight_s_bytes(b_dtype: Any, scale_dtype: Any) -> None:
    layer = fp4linear.Fp4Linear(B.view(b_dtype), SCALES.view(scale_dtype), 0.125)
    assert_same_bits(layer.forward(some_x()), fp4linear.Fp4Linear(B, SCALES, 0.125).forward(some_x()))


def test_one_code_a_byte_as_ml_dtypes_float4() -> None:
    codes = reference.codes(B).view(ml_dtypes.float4_e2m1fn)
    layer = fp4linear.Fp4Linear(codes, SCALES, 0.125)
    assert layer.in_features == K
    assert_same_bits(layer.forward(some_x()), fp4linear.Fp4Linear(B, SCALES, 0.125).forward(some_x()))


@pytest.mark.parametrize("bias_dtype", sorted(DTYPES))
def test_strided_weights_scales_and_bias(bias_dtype: str) -> None:
    bias = np.random.default_rng(3).standard_normal(2 * N).astype(DTYPES[bias_dtype])
    wide_b, wide_scales = np.full((N, K), 0x77, np.uint8), np.full((2 * N, K // 16), 0x7F, np.uint8)
    wide_b[:, ::2], wide_scales[::2] = B, SCALES
    strided = fp4linear.Fp4Linear(wide_b[:, ::2], wide_scales[::2], 0.125, bias[::2])
    plain = fp4linear.Fp4Linear(B, SCALES, 0.125, bias[::2].copy())
    fortran = fp4linear.Fp4Linear(np.asfortranarray(B), np.asfortranarray(SCALES), 0.125, bias[::2])
    flipped = fp4linear.Fp4Linear(B[::-1].copy()[::-1], SCALES[:, ::-1].copy()[:, ::-1], 0.125, bias[::2])
    y = plain.forward(some_x())
    for other in (strided, fortran, flipped):
        assert_same_bits(other.forward(some_x()), y)


def test_one_dimensional_and_many_dimensional_x(layer: fp4linear.Fp4Linear) -> None:
    x = some_x(m=12)
    y = layer.forward(x)
    assert layer.forward(x[0]).shape == (N,)
    assert_same_bits(layer.forward(x.reshape(2, 1, 3, 2, K)), y.reshape(2, 1, 3, 2, N))
    assert_same_bits(layer.forward(x.reshape(1, 1, 1, 2, 1, 3, 2, K)), y.reshape(1, 1, 1, 2, 1, 3, 2, N))


def test_swapped_byte_order_is_refused(layer: fp4linear.Fp4Linear) -> None:
    with pytest.raises(TypeError, match="x"):
        layer.forward(some_x().astype(">f2"))
    assert_within_contract(layer.forward(some_x()), right(some_x()))


# DLPack producers


@dtypes
@both_versions
@pytest.mark.parametrize("null_strides", [False, True])
def test_producer(layer: fp4linear.Fp4Linear, dtype: str, versioned: bool, null_strides: bool) -> None:
    x = some_x(dtype)
    producer = Producer(x, versioned=versioned, null_strides=null_strides)
    y = values_of(layer.forward(producer))
    assert_same_bits(y, layer.forward(x))
    gc.collect()
    assert producer.deletions == [1]


def test_the_result_for_a_producer_is_a_producer(layer: fp4linear.Fp4Linear) -> None:
    x = some_x()
    y = layer.forward(Producer(x))
    assert_same_bits(np.from_dlpack(y), layer.forward(x))


@both_versions
def test_weights_from_producers(versioned: bool) -> None:
    bias = np.arange(N, dtype=np.float32)
    arrays = (B, SCALES, np.array(0.125, np.float32), bias)
    producers = [Producer(array, versioned=versioned) for array in arrays]
    layer = fp4linear.Fp4Linear(*producers)
    y = layer.forward(some_x())
    assert_same_bits(y, fp4linear.Fp4Linear(B, SCALES, 0.125, bias).forward(some_x()))
    del layer
    gc.collect()
    assert [producer.deletions for producer in producers] == [[1]] * 4


def test_producer_from_before_max_version(layer: fp4linear.Fp4Linear) -> None:
    producer = Producer(some_x(), versioned=False, knows_max_version=False)
    assert_within_contract(values_of(layer.forward(producer)), right(some_x()))
    assert "max_version" not in producer.calls[-1]
    assert producer.deletions == [1]


def test_max_version_is_asked_for(layer: fp4linear.Fp4Linear) -> None:
    producer = Producer(some_x())
    layer.forward(producer)
    assert producer.calls[0]["max_version"][0] == 1


@both_versions
@pytest.mark.parametrize("byte_offset", [2, 6, 64])
def test_byte_offset(layer: fp4linear.Fp4Linear, byte_offset: int, versioned: bool) -> None:
    producer = Producer(some_x(), byte_offset=byte_offset, versioned=versioned)
    assert_same_bits(values_of(layer.forward(producer)), layer.forward(some_x()))


@both_versions
def test_strided_producers(layer: fp4linear.Fp4Linear, versioned: bool) -> None:
    wide = np.full((10, 2 * K), np.nan, np.float16)
    wide[::2, ::2] = some_x()
    for view in (wide[::2, ::2], wide[::2, ::2][::-1, ::-1], np.broadcast_to(some_x()[:1], (5, K))):
        producer = Producer(view, versioned=versioned)
        assert_same_bits(values_of(layer.forward(producer)), layer.forward(np.ascontiguousarray(view)))
        assert producer.deletions == [1]


def test_strides_of_size_1_axes_are_not_read(layer: fp4linear.Fp4Linear) -> None:
    x = some_x(m=1)
    odd = np.lib.stride_tricks.as_strided(x, (1, K), (14, 2))
    assert_same_bits(values_of(layer.forward(Producer(odd))), layer.forward(x))


BAD_PRODUCERS: dict[str, tuple[dict[str, Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    "ndim 0": ({"ndim": 0}, ValueError, "x"),
    "ndim 9": ({"ndim": 9}, ValueError, "x"),
    "ndim -1": ({"ndim": -1}, ValueError, "x"),
    "lanes 2": ({"dtype": (2, 16, 2)}, TypeError, "x.*float16"),
    "bits 8": ({"dtype": (2, 8, 1)}, TypeError, "x.*float16"),
    "bits 0": ({"dtype": (2, 0, 1)}, TypeError, "x"),
    "int16": ({"dtype": (0, 16, 1)}, TypeError, "x.*float16"),
    "opaque": ({"dtype": (3, 64, 1)}, TypeError, "x"),
    "device 2, id 99": ({"device": (CUDA, 99)}, (ValueError, BufferError), "x.*99"),
    "managed memory": ({"device": (CUDA_MANAGED, 0)}, (ValueError, BufferError), "x"),
    "unknown device": ({"device": (77, 3)}, (ValueError, BufferError), "x.*77"),
}


@both_versions
@pytest.mark.parametrize("kind", sorted(BAD_PRODUCERS))
def test_producers_that_do_not_fit(layer: fp4linear.Fp4Linear, kind: str, versioned: bool) -> None:
    options, error, words = BAD_PRODUCERS[kind]
    producer = Producer(some_x(), versioned=versioned, **options)
    with pytest.raises(error, match=words):
        layer.forward(producer)
    gc.collect()
    assert producer.deletions in ([], [1])  # not asked for at all, or freed once
    assert_within_contract(layer.forward(some_x()), right(some_x()))


def test_a_lying_device_method(layer: fp4linear.Fp4Linear) -> None:
    class Lying(Producer):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    producer = Lying(some_x(), device=(CUDA, 0))
    with pytest.raises((ValueError, BufferError), match="x"):
        layer.forward(producer)
    assert producer.deletions == [1]


def test_pinned_memory_is_host_memory(layer: fp4linear.Fp4Linear) -> None:
    producer = Producer(some_x(), device=(CUDA_HOST, 0))
    assert_within_contract(values_of(layer.forward(producer)), right(some_x()))


def test_a_newer_major_version_is_refused(layer: fp4linear.Fp4Linear) -> None:
    producer = Producer(some_x(), versioned=True, major=2)
    with pytest.raises(BufferError, match=r"x.*version"):
        layer.forward(producer)
    gc.collect()
    assert producer.deletions == [1]


def test_no_deleter(layer: fp4linear.Fp4Linear) -> None:
    class WithoutDeleter(Producer):
        def capsule(self, versioned: bool) -> Any:
            made = super().capsule(versioned)
            self.exports[-1].managed.deleter = None
            return made

    for versioned in (False, True):
        y = values_of(layer.forward(WithoutDeleter(some_x(), versioned=versioned)))
        assert_within_contract(y, right(some_x()))


def test_wrong_shape_from_a_producer_frees_it_once(layer: fp4linear.Fp4Linear) -> None:
    producer = Producer(np.ones((3, K + 2), np.float16))
    with pytest.raises(ValueError, match=r"x.*64|64.*x"):
        layer.forward(producer)
    gc.collect()
    assert producer.deletions == [1]


def test_wrong_weights_from_producers_are_freed_once() -> None:
    producers = [Producer(B), Producer(SCALES[:, :3].copy())]
    with pytest.raises(ValueError, match="scales"):
        fp4linear.Fp4Linear(*producers, 1.0)
    gc.collect()
    assert all(producer.deletions in ([], [1]) for producer in producers)


@both_versions
def test_a_capsule_is_used_once(layer: fp4linear.Fp4Linear, versioned: bool) -> None:
    producer = Producer(some_x())
    capsule = producer.capsule(versioned)
    assert_within_contract(values_of(layer.forward(capsule)), right(some_x()))
    assert producer.deletions == [1]
    with pytest.raises(BufferError, match="x"):
        layer.forward(capsule)
    del capsule
    gc.collect()
    assert producer.deletions == [1]


def test_exceptions_of_the_producer_come_through(layer: fp4linear.Fp4Linear) -> None:
    class Failing(Producer):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise RuntimeError("the producer's own trouble")

    with pytest.raises(BufferError, match=r"x: the producer's own trouble") as refused:
        layer.forward(Failing(some_x()))
    assert isinstance(refused.value.__cause__, RuntimeError)

    class NoCapsule(Producer):
        def __dlpack__(self, **arguments: Any) -> Any:
            return 5

    with pytest.raises((TypeError, BufferError), match="x"):
        layer.forward(NoCapsule(some_x()))
    assert_within_contract(layer.forward(some_x()), right(some_x()))


@pytest.mark.parametrize("answer", [None, 1, (), (1,), ("cpu", 0), (2**70, 0), "cpu"], ids=str)
def test_a_malformed_device(layer: fp4linear.Fp4Linear, answer: Any) -> None:
    class Malformed(Producer):
        def __dlpack_device__(self) -> Any:
            return answer

    with pytest.raises((TypeError, ValueError, BufferError), match=r"\bx\b"):
        layer.forward(Malformed(some_x()))
    assert_within_contract(layer.forward(some_x()), right(some_x()))


def test_an_interrupt_in_the_producer_stays_one(layer: fp4linear.Fp4Linear) -> None:
    class Interrupted(Producer):
        def __dlpack__(self, **arguments: Any) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        layer.forward(Interrupted(some_x()))


# out=


@dtypes
@pytest.mark.parametrize("m", [1, 9, 40])
def test_out_is_filled_and_returned(layer: fp4linear.Fp4Linear, dtype: str, m: int) -> None:
    x = some_x(dtype, m)
    out = np.full((m, N), np.nan, DTYPES[dtype])
    assert layer.forward(x, out=out) is out
    assert_same_bits(out, layer.forward(x))


def test_out_as_a_producer(layer: fp4linear.Fp4Linear) -> None:
    x, held = some_x(), np.full((5, N), np.nan, np.float16)
    out = Producer(held)
    assert layer.forward(x, out=out) is out
    assert_same_bits(held, layer.forward(x))
    assert out.deletions == [1]


def test_out_leaves_its_surroundings_alone(layer: fp4linear.Fp4Linear) -> None:
    """An out in the middle of a poisoned buffer, at an odd element: nothing else is written."""
    for m in (1, 7, 40):
        held = np.full(m * N + 64, 7.0, np.float16)
        x = some_x(m=m)
        layer.forward(x, out=held[31 : 31 + m * N].reshape(m, N))
        assert (held[:31] == 7.0).all() and (held[31 + m * N :] == 7.0).all()
        assert_same_bits(held[31 : 31 + m * N].reshape(m, N), layer.forward(x))


def read_only(array: NDArray) -> NDArray:
    array.flags.writeable = False
    return array


BAD_OUTS: dict[str, tuple[Any, type[Exception] | tuple[type[Exception], ...]]] = {
    "float32": (np.zeros((5, N), np.float32), (TypeError, ValueError)),
    "bfloat16": (np.zeros((5, N), ml_dtypes.bfloat16), (TypeError, ValueError)),
    "uint16": (np.zeros((5, N), np.uint16), (TypeError, ValueError)),
    "a column short": (np.zeros((5, N - 1), np.float16), ValueError),
    "a row more": (np.zeros((6, N), np.float16), ValueError),
    "flat": (np.zeros(5 * N, np.float16), ValueError),
    "another axis": (np.zeros((1, 5, N), np.float16), ValueError),
    "transposed shape": (np.zeros((N, 5), np.float16), ValueError),
    "read-only": (read_only(np.zeros((5, N), np.float16)), (ValueError, BufferError)),
    "read-only producer": (
        Producer(np.zeros((5, N), np.float16), versioned=True, flags=READ_ONLY),
        (ValueError, BufferError),
    ),
    "on a GPU": (Producer(np.zeros((5, N), np.float16), device=(CUDA, 0)), (ValueError, BufferError)),
    "overlapping rows": (np.lib.stride_tricks.as_strided(np.zeros(5 * N, np.float16), (5, N), (2, 2)), ValueError),
    "expanded": (np.lib.stride_tricks.as_strided(np.zeros((1, N), np.float16), (5, N), (0, 2)), ValueError),
    "columns apart": (np.zeros((5, 2 * N), np.float16)[:, ::2], ValueError),
    "Fortran order": (np.zeros((N, 5), np.float16).T, ValueError),
    "list": ([[0.0] * N] * 5, TypeError),
}


@pytest.mark.parametrize("kind", sorted(BAD_OUTS))
def test_outs_that_do_not_fit(layer: fp4linear.Fp4Linear, kind: str) -> None:
    out, error = BAD_OUTS[kind]
    with pytest.raises(error, match="out"):
        layer.forward(some_x(), out=out)
    held = out.array if isinstance(out, Producer) else np.asarray(out)
    assert (held.astype(np.float64) == 0).all()
    assert_within_contract(layer.forward(some_x()), right(some_x()))


def test_out_that_overlaps_x_is_refused() -> None:
    b, scales = reference.make(K, K, 5)
    square = fp4linear.Fp4Linear(b, scales, 0.125)
    held = np.zeros((6, K), np.float16)
    held[:] = reference.x_of(6, K, 8)
    before = held.copy()
    for x, out in ((held[:4], held[:4]), (held[:4], held[1:5]), (held[3:], held[1:4]), (held[::5], held[4:])):
        with pytest.raises(ValueError, match="out"):
            square.forward(x, out=out)
        assert_same_bits(held, before)
    # Beside it is not over it.
    square.forward(held[:3], out=held[3:6])
    assert_same_bits(held[3:6], square.forward(before[:3]))


def test_results_are_fresh(layer: fp4linear.Fp4Linear) -> None:
    first = layer.forward(some_x())
    kept = first.copy()
    second = layer.forward(some_x() * np.float16(-3))
    assert not np.shares_memory(first, second)
    assert_same_bits(first, kept)
