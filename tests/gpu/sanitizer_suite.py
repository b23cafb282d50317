"""A small program for compute-sanitizer: every kernel of this library once or twice, on shapes with edges, checked.

    compute-sanitizer --tool memcheck python3 -m tests.gpu.sanitizer_suite [PATH ...]
    python3 -m tests.gpu.sanitizer_suite --kernels [PATH ...]

Arrays come from CuPy without its memory pool, so that each has its own allocation and bounds, and no kernel of a
framework runs. PATH limits it to some paths ("prepare" is the kernels around them, "borrowed" is weights in JAX's
arrays, whose own kernels run too; it only runs where it is named). --kernels captures every call as well and asks the
graph for its kernels: each of tests/gpu/kernels.py that this machine can run has to be among them. Exit code 1: a wrong
result, or a kernel that nothing ran.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import fp4linear
from tests import reference
from tests.gpu.kernels import Machine, launched, missing
from tests.tolerance import assert_within_contract

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TYPES = [np.dtype(np.float16), BFLOAT16]
# N, K: tiles that are not full, one and several ranges of K, more tiles than a block has groups of warps.
SHAPES = {
    "gemv_tensor_core": [(1, 128), (19, 384), (40, 2048), (2150, 128), (33, 4096)],
    "gemv_scalar": [(1, 32), (19, 96), (1100, 64), (9, 1056)],
    "gemm_fused": [(1, 64), (19, 192), (300, 1024), (2150, 128), (520, 2048)],
    "dequant_cublas": [(1, 2), (19, 96), (33, 232), (40, 128)],
}
ROWS = {
    "gemv_tensor_core": (1, 2, 8),
    "gemv_scalar": (1, 3, 8),
    "gemm_fused": (1, 9, 33, 64, 130, 300),
    "dequant_cublas": (1, 9),
}
LARGE = 16 * 16  # rows of W an SM from which on the streaming kernels take no cluster
# N, N an SM, K, rows of x: layers that are not small, where the streaming kernels and the tiles run.
MORE = {
    "gemv_tensor_core": [
        (40, 0, 4160, (1, 2, 8)),
        (19, 0, 8256, (1, 8)),  # a cluster along K
        (8, 16, 8256, (3,)),  # as many tiles as SMs: a kernel of gemm_fused
        (19, 0, 41_024, (1, 8)),  # several launches
    ],
    "gemm_fused": [
        (40, 0, 4160, (1, 9, 33, 300)),
        (24, 16, 2112, (9, 24)),
        (24, LARGE, 192, (9, 32)),
        (19, 30, 192, (1000,)),  # tiles of 256 tokens, by pairs of blocks
        (19, 39, 4160, (400,)),  # which share tiles along K, and whose tiles are not full
        (19, 83, 1088, (90, 160)),  # tiles of 96 and 192 tokens, with helpers
        (19, 83, 2112, (250,)),  # pairs with helpers
    ],
}
INVARIANT = {"gemm_fused": [(40, 0, 4160, (1, 9, 33, 300)), (300, 0, 192, (2, 40))]}
named: set[str] | None = None  # kernels that were launched, where they are asked for


def find_cublas() -> None:
    """cuBLASLt of the NVIDIA wheels, which is on no search path of the loader."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        load_nvidia_dynamic_lib("cublasLt")
    except Exception as error:
        print(f"cuBLASLt was not preloaded: {error}")


def to_device(values: NDArray) -> Any:
    if values.dtype == BFLOAT16:
        return cupy.asarray(values.view(np.uint16)).view(BFLOAT16)
    return cupy.asarray(values)


def to_host(array: Any) -> NDArray:
    return array.view(np.uint16).get().view(BFLOAT16) if array.dtype == BFLOAT16 else array.get()


def weight(n: int, k: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    random = np.random.default_rng(n * k)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return b, random.integers(0x20, 0x59, (n, -(-k // 16)), dtype=np.uint8)


def name_kernels(call: Callable[[], object]) -> None:
    """Adds the kernels that a call launches, where they are asked for."""
    if named is None:
        return
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        call()  # this stream's scratch is taken before the capture
        stream.synchronize()
        named.update(launched(stream.ptr, call))


def check(layer: Any, values: NDArray, expected: reference.Expected, path: str | None, x: Any = None) -> None:
    x = to_device(values) if x is None else x
    y = layer.forward(x)
    assert layer.last_path == path, layer.last_path
    assert_within_contract(to_host(y), expected)
    name_kernels(lambda: layer.forward(x, out=y))


def run_layers(path: str, n: int, k: int, row_counts: tuple[int, ...], **options: Any) -> int:
    """A factor for all rows and no bias, then one a row and a bias."""
    b, scales = weight(n, k)
    rows, bias = np.linspace(-1, 1, n).astype(np.float32), np.linspace(-3, 3, n).astype(np.float32)
    for scale2, shift in ((0.125, None), (rows, bias)):
        layer = fp4linear.Fp4Linear(b, scales, scale2, shift, device="cuda", path=path, **options)
        for m in row_counts:
            for dtype in TYPES:
                values = np.random.default_rng(m).standard_normal((m, k)).astype(dtype)
                check(layer, values, reference.linear(values, b, scales, scale2, shift), path)
    return 2 * len(TYPES) * len(row_counts)


def run_path(path: str, sm_count: int) -> int:
    done = sum(run_layers(path, n, k, ROWS[path]) for n, k in SHAPES[path])
    done += sum(run_layers(path, n + each * sm_count, k, rows) for n, each, k, rows in MORE.get(path, ()))
    for n, each, k, rows in INVARIANT.get(path, ()):
        done += run_layers(path, n + each * sm_count, k, rows, batch_invariant=True)
    if path != "dequant_cublas":  # sums that leave the fp32 range and are made again
        b, _ = weight(40, 1024)
        scales = np.full((40, 64), 0x7E, np.uint8)
        layer = fp4linear.Fp4Linear(b, scales, 2.0**-40, device="cuda", path=path)
        for m in (1, 3):
            values = np.full((m, 1024), 2.0**127).astype(BFLOAT16)
            check(layer, values, reference.linear(values, b, scales, 2.0**-40), path)
            done += 1
    return done


def prepare() -> int:
    """Prepacking and back, gathering strided rows, empty sums."""
    for n, k in ((1, 64), (19, 192), (40, 128), (19, 230)):
        b, scales = weight(n, k)
        back = fp4linear.Fp4Linear(b, scales, 1.0, device="cuda").canonical()
        assert (back[0] == b).all() and (back[1] == scales).all()
        for form in (False, True)[: 2 if k % 64 == 0 else 1]:  # what native_nvfp4 reads, from either form
            made = fp4linear._core.native_weight(b, scales | 0x80, device=0, prepacked=form)
            for at, wanted in zip(made, fp4linear._core.native_weight(b, scales | 0x80), strict=True):
                assert (at == wanted).all()
    b, scales = weight(19, 128)
    layer = fp4linear.Fp4Linear(b, scales, 1.0, device="cuda")
    for dtype in TYPES:
        values = np.random.default_rng(0).standard_normal((6, 256)).astype(dtype)
        held = to_device(values)
        for view, same in (
            (held[:, ::2], values[:, ::2]),
            (held[:, 3:131], values[:, 3:131]),
            (held[::-1, :128], values[::-1, :128]),
        ):
            same = np.ascontiguousarray(same)
            check(layer, same, reference.linear(same, b, scales, 1.0), "gemv_tensor_core", view)
    bias = np.arange(5, dtype=np.float32)
    empty = fp4linear.Fp4Linear(np.zeros((5, 0), np.uint8), np.zeros((5, 0), np.uint8), 1.0, bias, device="cuda")
    for dtype in TYPES:
        check(empty, np.zeros((3, 0), dtype), reference.Expected(np.tile(bias, (3, 1)), np.zeros((3, 5))), None)
    return 12


def borrowed() -> int:
    """Weights in JAX's arrays, both forms that a GPU takes."""
    import jax

    import fp4linear.jax as fj

    done = 0
    for n, k in ((19, 192), (40, 4160)):
        b, scales = weight(n, k)
        scale2 = np.linspace(0.1, 1, n).astype(np.float32)
        for form in ("prepacked", "canonical"):
            params = fj.Fp4Params.from_canonical(b, scales, scale2, form=form, device=jax.devices("gpu")[0])
            for m in (1, 8) if form == "canonical" else (1, 8, 40):
                values = np.random.default_rng(m).standard_normal((m, k)).astype(np.float16)
                y = np.asarray(fj.linear(jax.device_put(values, jax.devices("gpu")[0]), params))
                assert_within_contract(y, reference.linear(values, b, scales, scale2))
                done += 1
    return done


def check_quantised(values: NDArray, **options: Any) -> None:
    """Bytes of the CPU's. Then from an address that is no multiple of 16."""
    want = fp4linear.quantize_activations(values, **options)
    shifted = to_device(np.concatenate([np.zeros(1, values.dtype), values.reshape(-1)]))[1:].reshape(values.shape)
    for x in (to_device(values), shifted):
        got = fp4linear.quantize_activations(x, **options)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and (a.get() == b).all()
        with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):  # no cudaMalloc in the capture
            name_kernels(lambda x=x: fp4linear.quantize_activations(x, **options))


def native() -> int:
    """Quantising x, and the path that multiplies what comes of it: the bits of the CPU."""
    done = 0
    for m, k in ((1, 2), (3, 48), (130, 178), (129, 4160)):
        for dtype in (*TYPES, np.dtype(np.float32)):
            values = np.random.default_rng(k).standard_normal((m, k)).astype(dtype)
            for g in (1.7, "dynamic"):
                for swizzled in (False, True):
                    check_quantised(values, global_scale=g, swizzled=swizzled)
                    done += 1
    for n, k in ((1, 2), (70, 192), (33, 178)):
        b, scales = weight(n, k)
        for options in ({"input_global_scale": 0.7}, {"input_global_scale": "dynamic"}):
            arguments: dict[str, Any] = {"bias": np.linspace(-3, 3, n).astype(np.float32), "path": "native_emulated"}
            layer = fp4linear.Fp4Linear(b, scales, 0.125, device="cuda", **arguments, **options)
            host = fp4linear.Fp4Linear(b, scales, 0.125, device="cpu", **arguments, **options)
            for dtype in TYPES:
                for m in (1, 65):
                    values = np.random.default_rng(m).standard_normal((m, k)).astype(dtype)
                    x = to_device(values)
                    y = layer.forward(x)
                    assert layer.last_path == "native_emulated"
                    assert (to_host(y).view(np.uint16) == host.forward(values).view(np.uint16)).all()
                    name_kernels(lambda layer=layer, x=x, y=y: layer.forward(x, out=y))
                    done += 1
    return done


def run_part(part: str) -> int:
    if part == "prepare":
        return prepare()
    if part == "borrowed":
        return borrowed()
    if part == "native_emulated":
        return native()
    probe = fp4linear.Fp4Linear(*weight(16, 128), 1.0, device="cuda", path=part).plan(1)
    if probe.path is None:
        raise SystemExit(f"{part} can't run here: {probe.reasons[part]}")
    return run_path(part, fp4linear._core.cuda_info()["devices"][0]["sm_count"])


def main(arguments: list[str]) -> None:
    global named
    cupy.cuda.set_allocator(None)
    find_cublas()
    machine = Machine.of(fp4linear._core.cuda_info())
    chosen = [argument for argument in arguments if argument != "--kernels"]
    absent = []
    for part in chosen or PARTS:
        named = set() if "--kernels" in arguments and part != "borrowed" else None
        done = run_part(part)
        cupy.cuda.Device().synchronize()
        print(f"{part}: {done} checks", flush=True)
        if named is not None:
            print("\n".join(f"  {name}" for name in sorted(named)))
            absent += [f"{part}: nothing ran {kernel}" for kernel in missing(part, named, machine)]
    if absent:
        raise SystemExit("\n".join(absent))


PARTS = ("prepare", *SHAPES, "native_emulated")

if __name__ == "__main__":
    main(sys.argv[1:])
