"""A small program for compute-sanitizer: every kernel of this library once or twice, on shapes with edges, checked.

    compute-sanitizer --tool memcheck python3 -m tests.gpu.sanitizer_suite [PATH ...]

Arrays come from CuPy without its memory pool, so that each has its own allocation and bounds, and no kernel of a
framework runs. PATH limits it to some paths ("prepare" is the kernels around them). Exit code 1: a wrong result.
"""

from __future__ import annotations

import sys
from typing import Any

import cupy
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import fp4linear
from tests import reference
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


def check(layer: Any, values: NDArray, expected: reference.Expected, path: str, x: Any = None) -> None:
    y = layer.forward(to_device(values) if x is None else x)
    assert layer.last_path == path, layer.last_path
    assert_within_contract(to_host(y), expected)


def run_path(path: str) -> int:
    done = 0
    for n, k in SHAPES[path]:
        b, scales = weight(n, k)
        rows, bias = np.linspace(-1, 1, n).astype(np.float32), np.linspace(-3, 3, n).astype(np.float32)
        for scale2, shift in ((0.125, None), (rows, bias)):
            layer = fp4linear.Fp4Linear(b, scales, scale2, shift, device="cuda", path=path)
            for dtype in TYPES:
                for m in ROWS[path]:
                    values = np.random.default_rng(m).standard_normal((m, k)).astype(dtype)
                    check(layer, values, reference.linear(values, b, scales, scale2, shift), path)
                    done += 1
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
    assert (to_host(empty.forward(to_device(np.zeros((3, 0), np.float16)))) == bias).all()
    return 12


def main(chosen: list[str]) -> None:
    cupy.cuda.set_allocator(None)
    find_cublas()
    for part in chosen or ["prepare", *SHAPES]:
        if part == "prepare":
            done = prepare()
        else:
            probe = fp4linear.Fp4Linear(*weight(16, 128), 1.0, device="cuda", path=part).plan(1)
            if probe.path is None:
                raise SystemExit(f"{part} can't run here: {probe.reasons[part]}")
            done = run_path(part)
        cupy.cuda.Device().synchronize()
        print(f"{part}: {done} checks", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
