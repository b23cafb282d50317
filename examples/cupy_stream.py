"""CuPy arrays on a GPU: the current stream, a stream as an argument, and a CUDA graph of the call."""

import sys

import numpy as np

import fp4linear

cuda = fp4linear._core.cuda_info()
if not cuda["devices"]:
    print(f"skipped: {cuda['reason']}")
    sys.exit()
try:
    import cupy as cp
except ImportError:
    print("skipped: CuPy is not installed")
    sys.exit()

rng = np.random.default_rng(0)
q = fp4linear.quantize(rng.standard_normal((1024, 4096), dtype=np.float32) / 64)
layer = fp4linear.Fp4Linear(*q, device="cuda")
x = cp.asarray(rng.standard_normal((4, 4096)), cp.float16)
y = layer(x)  # CuPy in, CuPy out, on CuPy's current stream
exact = fp4linear.reference(cp.asnumpy(x), *q)
assert np.abs(cp.asnumpy(y) - exact).max() < 1e-3 * np.abs(exact).max()

# Work that is queued on another stream: the call waits for it on the GPU, not on the host.
stream = cp.cuda.Stream(non_blocking=True)
with stream:
    doubled = layer(x * 2)
stream.synchronize()
assert np.abs(cp.asnumpy(doubled) - 2 * exact).max() < 2e-3 * np.abs(exact).max()

# Into the caller's memory on the caller's stream: nothing is allocated, so a graph can hold the call.
out = cp.empty_like(y)
stream.begin_capture()
layer(x, out=out, stream=stream)
graph = stream.end_capture()
x[...] = -x  # the graph reads x when it runs
cp.cuda.get_current_stream().synchronize()
graph.launch(stream)
stream.synchronize()
assert (out == layer(x)).all()
print(f"{layer} ran from CuPy as {layer.last_path}, and from a CUDA graph")
