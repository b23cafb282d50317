"""Bad input of every kind: the exception's type, the argument's name in it, and a layer that still works after it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.backends import ALL_ISAS
from tests.tolerance import assert_same_bits, assert_within_contract

N, K = 12, 48
B, SCALES = reference.make(N, K, 1)
X = reference.x_of(3, K, 2)


def build(**changed: Any) -> fp4linear.Fp4Linear:
    arguments: dict[str, Any] = {"b": B, "scales": SCALES, "scale2": 1.0} | changed
    return fp4linear.Fp4Linear(
        arguments.pop("b"), arguments.pop("scales"), arguments.pop("scale2"), arguments.pop("bias", None), **arguments
    )


WRONG_TYPES: dict[str, tuple[str, Any]] = {
    "b float32": ("b", B.astype(np.float32)),
    "b int16": ("b", B.astype(np.int16)),
    "b bool": ("b", B.astype(bool)),
    "b list": ("b", B.tolist()),
    "b None": ("b", None),
    "b str": ("b", "weight"),
    "b bytes": ("b", B.tobytes()),
    "b objects": ("b", B.astype(object)),
    "scales float32": ("scales", SCALES.astype(np.float32)),
    "scales float8_e5m2": ("scales", SCALES.view(ml_dtypes.float8_e5m2)),
    "scales float8_e8m0": ("scales", SCALES.view(ml_dtypes.float8_e8m0fnu)),
    "scales int64": ("scales", SCALES.astype(np.int64)),
    "scales list": ("scales", SCALES.tolist()),
    "scales None": ("scales", None),
    "scale2 None": ("scale2", None),
    "scale2 str": ("scale2", "1.0"),
    "scale2 bool": ("scale2", True),
    "scale2 list": ("scale2", [1.0]),
    "scale2 complex": ("scale2", 1j),
    "scale2 numpy complex": ("scale2", np.complex64(1 + 1j)),
    "scale2 complex array": ("scale2", np.ones(N, np.complex64)),
    "scale2 dict": ("scale2", {}),
    "scale2 date": ("scale2", np.datetime64("2020-01-01")),
    "scale2 uint8 array": ("scale2", np.ones(N, np.uint8)),
    "bias float64": ("bias", np.zeros(N)),
    "bias int32": ("bias", np.zeros(N, np.int32)),
    "bias bool": ("bias", np.zeros(N, bool)),
    "bias list": ("bias", [0.0] * N),
    "bias number": ("bias", 0.0),
    "block_size float": ("block_size", 16.5),
    "block_size str": ("block_size", "16"),
    "block_size None": ("block_size", None),
    "threads str": ("threads", "2"),
    "path None": ("path", None),
    "path number": ("path", 3),
    "isa number": ("isa", 3),
    "device number": ("device", 0),
    "nan_scales bool": ("nan_scales", True),
}

WRONG_VALUES: dict[str, tuple[str, Any]] = {
    "b 1-D": ("b", B.reshape(-1)),
    "b 3-D": ("b", B[None]),
    "b 0-D": ("b", np.array(1, np.uint8)),
    "b rows": ("b", B[:-1]),
    "b columns": ("b", B[:, :8]),
    "b odd K": ("b", np.zeros((N, K - 1), np.uint8).view(ml_dtypes.float4_e2m1fn)),
    "scales 1-D": ("scales", SCALES.reshape(-1)),
    "scales a block more": ("scales", np.zeros((N, K // 16 + 1), np.uint8)),
    "scales a block less": ("scales", SCALES[:, :-1]),
    "scales transposed": ("scales", SCALES.T),
    "scales a row more": ("scales", np.zeros((N + 1, K // 16), np.uint8)),
    "scales padded": ("scales", np.zeros((128, 4), np.uint8)),
    "scales empty": ("scales", np.zeros((0, 0), np.uint8)),
    "scale2 shape [2]": ("scale2", np.ones(2, np.float32)),
    "scale2 shape [0]": ("scale2", np.ones(0, np.float32)),
    "scale2 shape [N, 1]": ("scale2", np.ones((N, 1), np.float32)),
    "scale2 NaN": ("scale2", float("nan")),
    "scale2 inf": ("scale2", float("inf")),
    "scale2 -inf": ("scale2", np.float32("-inf")),
    "scale2 beyond fp32": ("scale2", 1e39),
    "scale2 a huge integer": ("scale2", 10**400),
    "scale2 one NaN a row": ("scale2", np.array([1.0] * (N - 1) + [np.nan], np.float32)),
    "bias rows": ("bias", np.zeros(N + 1, np.float32)),
    "bias one": ("bias", np.zeros(1, np.float32)),
    "bias 2-D": ("bias", np.zeros((1, N), np.float32)),
    "bias 0-D": ("bias", np.zeros((), np.float32)),
    "block_size 0": ("block_size", 0),
    "block_size -16": ("block_size", -16),
    "block_size that scales do not fit": ("block_size", 32),
    "threads 0": ("threads", 0),
    "threads -1": ("threads", -1),
    "path unknown": ("path", "fast"),
    "path empty": ("path", ""),
    "isa unknown": ("isa", "avx1024"),
    "device unknown": ("device", "tpu"),
    "device misspelt": ("device", "cuda0"),
    "device cuda index": ("device", "cuda:x"),
    "nan_scales unknown": ("nan_scales", "ignore"),
}

# What names the argument of the message where it is not the one changed: the other of two that do not fit together.
NAMES = {"b rows": "scales", "b columns": "scales", "block_size that scales do not fit": "block_size"}


@pytest.mark.parametrize("kind", list(WRONG_TYPES))
def test_wrong_type(kind: str) -> None:
    argument, value = WRONG_TYPES[kind]
    with pytest.raises(TypeError, match=rf"\b{argument}\b"):
        build(**{argument: value})


@pytest.mark.parametrize("kind", list(WRONG_VALUES))
def test_wrong_value(kind: str) -> None:
    argument, value = WRONG_VALUES[kind]
    with pytest.raises(ValueError, match=rf"\b{NAMES.get(kind, argument)}\b"):
        build(**{argument: value})


def test_messages_say_what_was_expected_and_what_came() -> None:
    with pytest.raises(ValueError, match=r"scales.*\[12, 3\].*\[12, 4\]"):
        build(scales=np.zeros((12, 4), np.uint8))
    with pytest.raises(ValueError, match=r"b.*\[12, 1, 24\]"):
        build(b=B[:, None])
    with pytest.raises(ValueError, match=r"x.*48.*\[3, 24\]"):
        build().forward(X[:, :24])
    with pytest.raises(ValueError, match=r"bias.*\[12\].*\[13\]"):
        build(bias=np.zeros(13, np.float32))
    with pytest.raises(ValueError, match=r"scales.*2.*NaN.*row 4, block 1"):
        scales = SCALES.copy()
        scales[4, 1], scales[7, 0] = 0x7F, 0xFF
        build(scales=scales)
    with pytest.raises(ValueError, match=r"swizzled"):
        build(scales=np.zeros((128, 4), np.uint8))
    for name in ALL_ISAS:
        with pytest.raises(ValueError, match=name):
            build(isa="sse9")


WRONG_X_TYPES: dict[str, Any] = {
    "float64": X.astype(np.float64),
    "float8": X.astype(ml_dtypes.float8_e4m3fn),
    "float4": X.astype(ml_dtypes.float4_e2m1fn),
    "int8": X.astype(np.int8),
    "uint16": X.view(np.uint16),
    "bool": X.astype(bool),
    "complex64": X.astype(np.complex64),
    "objects": X.astype(object),
    "strings": X.astype("U8"),
    "structured": np.zeros((3, K), [("a", np.float16)]),
}
NOT_ARRAYS: dict[str, Any] = {
    "list": X.tolist(),
    "None": None,
    "number": 1.0,
    "str": "x",
    "bytes": X.tobytes(),
    "class": np.ndarray,
}
WRONG_X_SHAPES: dict[str, Any] = {
    "K/2": X[:, : K // 2],
    "K+16": np.ones((3, K + 16), np.float16),
    "2K": np.ones((3, 2 * K), np.float16),
    "transposed": np.ones((K, 3), np.float16),
    "0-D": np.array(1.0, np.float16),
    "1-D": np.ones(K - 1, np.float16),
    "empty": np.ones((0,), np.float16),
    "empty last axis": np.ones((3, 0), np.float16),
    "9-D": np.ones((1,) * 8 + (K,), np.float16),
}


@pytest.mark.parametrize("kind", list(WRONG_X_TYPES))
def test_wrong_x_type_names_the_right_ones(kind: str) -> None:
    layer = build()
    before = layer.forward(X)
    with pytest.raises(TypeError, match=r"\bx\b.*float16.*bfloat16"):
        layer.forward(WRONG_X_TYPES[kind])
    assert_same_bits(layer.forward(X), before)


@pytest.mark.parametrize("kind", list(NOT_ARRAYS))
def test_x_that_is_no_array(kind: str) -> None:
    layer = build()
    with pytest.raises(TypeError, match=r"\bx\b"):
        layer.forward(NOT_ARRAYS[kind])
    assert_within_contract(layer.forward(X), reference.linear(X, B, SCALES, 1.0))


@pytest.mark.parametrize("kind", list(WRONG_X_SHAPES))
def test_wrong_x_shape(kind: str) -> None:
    layer = build()
    before = layer.forward(X)
    with pytest.raises(ValueError, match=r"\bx\b"):
        layer.forward(WRONG_X_SHAPES[kind])
    assert_same_bits(layer.forward(X), before)


def test_a_result_that_does_not_fit_in_memory() -> None:
    layer = build()
    x = np.lib.stride_tricks.as_strided(X, (2**52, K), (0, 2))
    with pytest.raises((MemoryError, ValueError)):
        layer.forward(x)
    assert_within_contract(layer.forward(X), reference.linear(X, B, SCALES, 1.0))


def test_stream_on_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="stream"):
        build().forward(X, stream=0)


def test_forward_takes_keywords_only() -> None:
    with pytest.raises(TypeError):
        build().forward(X, np.zeros((3, N), np.float16))
    with pytest.raises(TypeError):
        fp4linear.Fp4Linear(B, SCALES, 1.0, None, 16)
    with pytest.raises(TypeError):
        build(blocksize=16)


@pytest.mark.parametrize("bad", [-1, 1.5, "1", None])
def test_plan_of_a_bad_m(bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="M"):
        build().plan(bad)


def test_plan_of_a_bad_dtype() -> None:
    with pytest.raises(ValueError, match="dtype"):
        build().plan(1, dtype="float64")


def test_attributes_are_read_only() -> None:
    layer = build()
    for name in ("in_features", "out_features", "block_size", "nbytes", "device", "isa", "last_path"):
        with pytest.raises(AttributeError):
            setattr(layer, name, 5)


@pytest.mark.parametrize("function", ["dequantize", "reference"])
def test_functions_check_their_weight_too(function: str) -> None:
    def call(b: Any = B, scales: Any = SCALES, scale2: Any = 1.0, block_size: int = 16) -> Any:
        if function == "dequantize":
            return fp4linear.dequantize(b, scales, scale2, block_size=block_size)
        return fp4linear.reference(X, b, scales, scale2, block_size=block_size)

    for argument, value in (
        ("b", B[0]), ("scales", SCALES[:, :-1]), ("scales", SCALES.T), ("scale2", np.ones(2, np.float32)),
        ("block_size", 0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"\b{argument}\b"):
            call(**{argument: value})
    with pytest.raises(TypeError, match=r"\bb\b"):
        call(b=B.astype(np.float64))
    call()
