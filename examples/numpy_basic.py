"""A float weight as NVFP4, multiplied from NumPy: quantise, run, look at the plan, check against float64."""

import numpy as np

import fp4linear

rng = np.random.default_rng(0)
w = rng.standard_normal((1024, 4096), dtype=np.float32) / 64
bias = rng.standard_normal(1024, dtype=np.float32)

q = fp4linear.quantize(w, method="four_over_six")
layer = fp4linear.Fp4Linear(*q, bias=bias)
print(f"{layer}: {layer.nbytes / w.nbytes:.1%} of the float32 weight's bytes")

x = rng.standard_normal((8, 4096)).astype(np.float16)
y = layer(x)  # float16 [8, 1024], rounded once from fp32 sums
out = np.empty((8, 1024), np.float16)
layer(x, out=out)  # into memory of the caller's
assert (out == y).all()

print(layer.plan(8, "float16"))  # the path that 8 rows of x take, and why not the others

exact = fp4linear.reference(x, *q, bias)
error = np.abs(y - exact).max() / np.abs(exact).max()
dense = x.astype(np.float64) @ w.T.astype(np.float64) + bias
print(f"error of the kernel {error:.1e}, of the quantisation {np.abs(exact - dense).max() / np.abs(dense).max():.1e}")
assert error < 1e-3
