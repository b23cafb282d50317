"""The machine code of the installed module: every GPU path has its kernels, for every architecture that can run it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp4linear import _core
from tests.build import elf
from tests.gpu.kernels import KERNELS as ALL_KERNELS

MODULE = Path(_core.__file__)
# Path to (part of a kernel's name, the first compute capability that the path runs on, fewest instances): fp16 and bf16
# each, and for the GEMVs one kernel for one row of x and another for several.
KERNELS = {
    "gemv_tensor_core": ("gemv_kernel", 80, 4),
    "gemv_tensor_core, small layers": ("small_kernel", 80, 4),
    "gemv_scalar": ("scalar_kernel", 75, 4),
    "gemm_fused": ("general_kernel", 80, 4),
    "gemm_fused, few rows": ("stream_kernel", 80, 4),
    "gemm_fused, wgmma": ("gemm_kernel", 90, 8),
    "dequant_cublas": ("dequantize_kernel", 75, 2),
    "prepacking": ("prepack_kernel", 75, 1),
    "canonical()": ("unpack_kernel", 75, 1),
    "strided x": ("gather_kernel", 75, 1),
    # float16, bfloat16 and float32; aligned or not; plain or swizzled scales. The number keeps dequantize_kernel out.
    "quantising x": ("15quantize_kernel", 75, 12),
    "the dynamic scale of x": ("amax_kernel", 75, 6),
    "native_emulated": ("emulated_kernel", 75, 2),
    "the weight of native_nvfp4": ("swizzle_kernel", 75, 2),
}

pytestmark = pytest.mark.skipif(not _core.cuda_info()["built"], reason="this build has no CUDA")


def architectures() -> set[str]:
    """Those of our own kernels. A family's (sm_120f) are CUTLASS's for native_nvfp4: test_wheel.py."""
    return {name for name in elf.sass_architectures(MODULE) if not name.endswith("f")}


def capability(architecture: str) -> int:
    return int(architecture.removeprefix("sm_").rstrip("abcdef"))


@pytest.mark.parametrize("path", list(KERNELS))
def test_every_path_has_machine_code(path: str) -> None:
    name, least, instances = KERNELS[path]
    wanted = [each for each in architectures() if capability(each) >= least]
    assert wanted
    for architecture in wanted:
        found = {kernel for kernel in elf.kernels(MODULE, architecture) if name in kernel}
        assert len(found) >= instances, f"{architecture}: {sorted(found)}"


@pytest.mark.parametrize("path", ["gemv_tensor_core", "gemv_scalar", "gemm_fused", "gemm_fused, few rows"])
def test_both_types_of_x_have_kernels(path: str) -> None:
    name, least, _ = KERNELS[path]
    for architecture in architectures():
        if capability(architecture) < least:
            continue
        found = [kernel for kernel in elf.kernels(MODULE, architecture) if name in kernel]
        for dtype in ("7Float16", "8BFloat16"):  # as C++ mangles their names
            assert any(dtype in kernel for kernel in found), f"{architecture} has no {path} for {dtype[1:]}"


def test_the_sanitizer_suite_knows_every_kernel_by_its_name() -> None:
    """Each name is of one entry, so that what a GPU reports can be told apart."""
    for architecture in architectures():
        for name in elf.kernels(MODULE, architecture):
            found = [kernel for kernel in ALL_KERNELS if re.search(kernel.pattern, name)]
            assert len(found) == 1, f"{name}: {found}"


@pytest.mark.parametrize("path", ["quantising x", "the dynamic scale of x", "native_emulated"])
def test_nothing_spills(path: str) -> None:
    for architecture in architectures():
        stacks = elf.stack_bytes(MODULE, architecture)
        found = {kernel: stack for kernel, stack in stacks.items() if KERNELS[path][0] in kernel}
        assert found and not any(found.values()), f"{architecture}: {found}"


# The tensor cores' instruction that a kernel is made of. wgmma is sm_90a's alone: elsewhere its kernels are empty.
INSTRUCTIONS = {
    "gemv_kernel": ("HMMA.16816", lambda architecture: capability(architecture) >= 80),
    "general_kernel": ("HMMA.16816", lambda architecture: capability(architecture) >= 80),
    "gemm_kernel": ("HGMMA", lambda architecture: architecture == "sm_90a"),
    "wgmma_stream_kernel": ("HGMMA", lambda architecture: architecture == "sm_90a"),
}


@pytest.mark.parametrize("name", list(INSTRUCTIONS))
def test_kernels_use_the_tensor_cores(name: str) -> None:
    instruction, has = INSTRUCTIONS[name]
    for architecture in architectures():
        kernel = min(each for each in elf.kernels(MODULE, architecture) if name in each)
        found = instruction in elf.sass(MODULE, architecture, kernel)
        assert found == has(architecture), f"{kernel} of {architecture}"


def test_wgmma_runs_ahead_of_what_follows_it() -> None:
    """Every kernel waits for all but the last group somewhere in its loop.

    ptxas serialises all wgmma of a kernel where it sees an accumulator read before its wait (C7514, a mere remark):
    each is then waited for by itself, and nothing but time shows it.
    """
    if "sm_90a" not in architectures():
        pytest.skip("no sm_90a in this build")
    codes = {name: code for name, code in elf.all_sass(MODULE, "sm_90a").items() if "HGMMA" in code}
    assert len(codes) >= 40
    serialised = [name for name, code in codes.items() if "DEPBAR.LE gsb0, 0x1" not in code]
    assert not serialised, serialised
