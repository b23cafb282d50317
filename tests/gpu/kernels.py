"""The kernels of the CUDA backend by name, the part of the sanitizer suite that runs each, and what a call launches."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """One `__global__` function, or the instances of it that a pattern tells apart by their mangled names."""

    source: str  # of cuda/
    name: str
    parts: tuple[str, ...]  # of the sanitizer suite; none: `why`
    pattern: str  # in the mangled name
    needs: str = ""  # of the build and the GPU: "", "wgmma", "no wgmma", "clusters", "no clusters"
    seen: bool = True  # in a graph of calls; what runs at construction is shown by its result
    why: str = ""


def mangled(name: str) -> str:
    return f"{len(name)}{name}"


STREAMED, FUSED, CUBLAS, NATIVE = "gemv_tensor_core", "gemm_fused", "dequant_cublas", "native_emulated"
WGMMA = r"10gemm_wgmma11gemm_kernelI\w+"
KERNELS = (
    Kernel("prepack.cu", "prepack_kernel", ("prepare",), mangled("prepack_kernel"), seen=False),
    Kernel("prepack.cu", "unpack_kernel", ("prepare",), mangled("unpack_kernel"), seen=False),
    Kernel("prepack.cu", "dequantize_kernel", (CUBLAS,), r"_prepack_cu_\w+17dequantize_kernel"),
    Kernel("dequantize.cu", "dequantize_kernel", (CUBLAS,), r"_dequantize_cu_\w+17dequantize_kernel"),
    Kernel("dequant_cublas.cu", "scale_and_round", (CUBLAS,), mangled("scale_and_round")),
    Kernel("elementwise.cu", "gather_kernel", ("prepare",), mangled("gather_kernel")),
    Kernel("elementwise.cu", "fill_kernel", ("prepare",), mangled("fill_kernel")),
    Kernel("gemv_scalar.cu", "scalar_kernel", ("gemv_scalar",), mangled("scalar_kernel")),
    Kernel("gemv_small.cu", "small_kernel", (STREAMED, FUSED), mangled("small_kernel")),
    # One row of x or several; alone or, where K is long, in a cluster of blocks.
    Kernel("gemv_tensor_core.cu", "gemv_kernel", (STREAMED,), r"11gemv_kernelI\w+ELb1E\w+ELb0EEE"),
    Kernel("gemv_tensor_core.cu", "gemv_kernel", (STREAMED,), r"11gemv_kernelI\w+ELb0E\w+ELb0EEE"),
    Kernel("gemv_tensor_core.cu", "gemv_kernel", (STREAMED,), r"11gemv_kernelI\w+ELb1E\w+ELb1EEE", "clusters"),
    Kernel("gemv_tensor_core.cu", "gemv_kernel", (STREAMED,), r"11gemv_kernelI\w+ELb0E\w+ELb1EEE", "clusters"),
    Kernel("gemm_mma_stream.cu", "stream_kernel", (FUSED,), r"13stream_kernelI\w+ELb0EEE", "no clusters"),
    Kernel("gemm_mma_stream.cu", "stream_kernel", (FUSED,), r"13stream_kernelI\w+ELb1EEE", "clusters"),
    Kernel("gemm_wgmma_stream.cu", "wgmma_stream_kernel", (FUSED,), r"19wgmma_stream_kernelI\w+ELb0EEE", "wgmma"),
    Kernel("gemm_wgmma_stream.cu", "wgmma_stream_kernel", (FUSED,), r"19wgmma_stream_kernelI\w+ELb1EEE", "wgmma"),
    # A block a tile, a cluster of blocks along K, or two blocks that share x.
    Kernel(
        "device/gemm_wgmma.cuh", "gemm_kernel", (FUSED,), WGMMA + r"ELi(?:16|32|64|128|256)ELi\w+ELb0ELb0EEE", "wgmma"
    ),
    Kernel("device/gemm_wgmma.cuh", "gemm_kernel", (FUSED,), WGMMA + r"ELi96ELi\w+ELb0ELb0EEE", "wgmma"),
    Kernel("device/gemm_wgmma.cuh", "gemm_kernel", (FUSED,), WGMMA + r"ELi192ELi\w+ELb0ELb0EEE", "wgmma"),
    Kernel("device/gemm_wgmma.cuh", "gemm_kernel", (FUSED,), WGMMA + r"ELb1ELb0EEE", "wgmma"),
    Kernel("device/gemm_wgmma.cuh", "gemm_kernel", (FUSED,), WGMMA + r"ELb0ELb1EEE", "wgmma"),
    # Where there is wgmma no call comes here: `gpu_check.sh --sanitizer` runs the part with a wheel of older PTX too.
    Kernel("gemm_mma.cu", "general_kernel", (FUSED,), mangled("general_kernel"), "no wgmma"),
    Kernel("gemm_mma.cu", "reduce_kernel", (FUSED,), mangled("reduce_kernel"), "no wgmma"),
    # Whole blocks that are aligned or not; plain scales or swizzled.
    Kernel("quantize_activations.cu", "quantize_kernel", (NATIVE,), r"15quantize_kernelI\w+ELb1ELb0EEE"),
    Kernel("quantize_activations.cu", "quantize_kernel", (NATIVE,), r"15quantize_kernelI\w+ELb1ELb1EEE"),
    Kernel("quantize_activations.cu", "quantize_kernel", (NATIVE,), r"15quantize_kernelI\w+ELb0ELb0EEE"),
    Kernel("quantize_activations.cu", "quantize_kernel", (NATIVE,), r"15quantize_kernelI\w+ELb0ELb1EEE"),
    Kernel("quantize_activations.cu", "amax_kernel", (NATIVE,), r"11amax_kernelI\w+ELb1EEE"),
    Kernel("quantize_activations.cu", "amax_kernel", (NATIVE,), r"11amax_kernelI\w+ELb0EEE"),
    Kernel("native_emulated.cu", "emulated_kernel", (NATIVE,), mangled("emulated_kernel")),
    Kernel("native_weight.cu", "swizzle_kernel", ("prepare",), mangled("swizzle_kernel"), seen=False),
    Kernel("native_weight.cu", "codes_kernel", ("prepare",), mangled("codes_kernel"), seen=False),
)


class Machine(NamedTuple):
    """What decides which kernels a GPU runs."""

    clusters: bool
    wgmma: bool

    @staticmethod
    def of(info: dict[str, Any]) -> Machine:
        """By `_core.cuda_info()`: the first GPU, and what the build holds for it."""
        sm = info["devices"][0]["sm"]
        built = re.findall(r"\d+[af]?", info["architectures"])
        arch = max((int(a.rstrip("af")) for a in built if int(a.rstrip("af")) <= sm), default=0)
        return Machine(clusters=arch >= 90, wgmma=sm == 90 and "90a" in built)

    def runs(self, kernel: Kernel) -> bool:
        met = {"": True, "clusters": self.clusters, "wgmma": self.wgmma}
        return met[kernel.needs] if kernel.needs in met else not met[kernel.needs.removeprefix("no ")]


def missing(part: str, names: set[str], machine: Machine) -> list[str]:
    """Kernels that the part has to launch on this machine and none of the mangled names is."""
    wanted = [kernel for kernel in KERNELS if part in kernel.parts and kernel.seen and machine.runs(kernel)]
    return [f"{k.source}: {k.pattern}" for k in wanted if not any(re.search(k.pattern, name) for name in names)]


def launched(stream: int, call: Callable[[], object]) -> set[str]:
    """The mangled names of the kernels that a call enqueues on a stream, by a capture of it that is never launched.

    By the driver's own functions: the libraries' graphs hide their nodes.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    graph = ctypes.c_void_p()
    global_mode = 0
    _check(cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), global_mode))
    try:
        call()
    finally:
        status = cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    _check(status)
    try:
        count = ctypes.c_size_t()
        _check(cuda.cuGraphGetNodes(graph, None, ctypes.byref(count)))
        nodes = (ctypes.c_void_p * count.value)()
        _check(cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(count)))
        return {name for node in nodes if (name := _kernel_of(cuda, ctypes.c_void_p(node))) is not None}
    finally:
        _check(cuda.cuGraphDestroy(graph))


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # grid, block, shared memory
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
    )


def _kernel_of(cuda: Any, node: ctypes.c_void_p) -> str | None:
    kind, kernel_kind = ctypes.c_int(), 0
    _check(cuda.cuGraphNodeGetType(node, ctypes.byref(kind)))
    if kind.value != kernel_kind:
        return None
    parameters, name = _KernelNode(), ctypes.c_char_p()
    _check(cuda.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(parameters)))
    if parameters.func:
        _check(cuda.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(parameters.func)))
    else:
        _check(cuda.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(parameters.kern)))
    return (name.value or b"").decode()


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the driver's error {status}")
