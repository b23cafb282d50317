"""A GPU whose memory has run out: MemoryError, and every object works as before once there is some again.

It takes all of the GPU's memory, so nothing else may run on it: `tools/gpu_check.sh --tests` runs it alone, after the
others, by FP4LINEAR_TEST_EXHAUSTION=1.
"""

from __future__ import annotations

import os

import pytest

from tests.child import run_child

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("FP4LINEAR_TEST_EXHAUSTION") != "1",
        reason="takes all of the GPU's memory: FP4LINEAR_TEST_EXHAUSTION=1 runs it",
    ),
]

EXHAUSTION = """
    import gc, torch, numpy as np, fp4linear
    from tests import reference

    n = k = 4096
    b, scales = reference.make(n, k, 1)
    rows = np.linspace(0.5, 2, n).astype(np.float32)
    x = torch.from_numpy(reference.x_of(300, k, 2)).cuda()
    out = torch.full((300, n), float("nan"), dtype=x.dtype, device="cuda")
    ready = fp4linear.Fp4Linear(b, scales, 2.0**-8, device="cuda")
    gemm = fp4linear.Fp4Linear(b, scales, rows, device="cuda", path="gemm_fused")
    cublas = fp4linear.Fp4Linear(b, scales, rows, device="cuda", path="dequant_cublas")
    # A stream has scratch of its own, which a first call on it takes: here and, for `other`, without memory.
    one = ready.forward(x[:1])
    many = gemm.forward(x)
    other = torch.cuda.Stream()
    # torch.equal() on the GPU takes memory there for its answer: what is compared without any is compared on the host.
    host_one, host_many, seen = one.cpu(), many.cpu(), out.cpu()
    canonical = ready.canonical()
    torch.cuda.synchronize()

    hog = []
    def exhaust():
        size = torch.cuda.mem_get_info()[0]
        while size >= 1 << 12:
            try: hog.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except RuntimeError as error:  # without its cache torch raises its AcceleratorError
                assert "out of memory" in str(error), error
                size //= 2
    exhaust()

    def refused(call):
        try: call()
        except MemoryError as error:
            assert "cudaErrorMemoryAllocation" in str(error), error
            return
        raise AssertionError("there was memory")

    def on_other(call):
        with torch.cuda.stream(other):
            return call()

    for turn in range(3):
        refused(lambda: fp4linear.Fp4Linear(b, scales, rows, device="cuda"))
        refused(lambda: on_other(lambda: cublas.forward(x, out=out)))
        refused(lambda: ready.canonical())  # it unpacks on the GPU
        try: ready.forward(x)  # torch makes the result
        except (MemoryError, RuntimeError) as error: assert "memory" in str(error), error
        else: raise AssertionError("there was memory for a result")
        # What needs no memory still runs, and a refused call has left nothing behind on the stream or in the driver.
        out.fill_(float("nan"))
        ready.forward(x[:1], out=out[:1])
        seen.copy_(out)
        assert torch.equal(seen[:1], host_one) and seen[1:].isnan().all()
        gemm.forward(x, out=out)
        seen.copy_(out)
        assert torch.equal(seen, host_many)

    hog.clear()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for turn in range(3):
        assert torch.equal(ready.forward(x[:1]), one) and torch.equal(gemm.forward(x), many)
        y = on_other(lambda: cublas.forward(x))
        other.synchronize()
        assert (y.float() - many.float()).abs().max() <= 2.0**-8 * many.float().abs().max()
        assert all((ours == theirs).all() for ours, theirs in zip(ready.canonical(), canonical))
        made = fp4linear.Fp4Linear(b, scales, rows, device="cuda", path="gemm_fused")
        assert torch.equal(made.forward(x), many)
        del made, y
    gc.collect()
    torch.cuda.synchronize()
    kept = before - torch.cuda.mem_get_info()[0]
    assert kept < 200 << 20, f"{kept} bytes more than the scratch of one stream"
    print("done")
"""


@pytest.mark.slow
def test_memory_runs_out_and_comes_back() -> None:
    # Without torch's cache every tensor is a cudaMalloc of its own, and its end a cudaFree.
    assert run_child(EXHAUSTION, PYTORCH_NO_CUDA_MEMORY_CACHING="1").stdout == "done\n"
