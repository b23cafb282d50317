"""What every rank of the tensor-parallel tests does, on the CPU with gloo and on GPUs with NCCL."""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from fp4linear.torch import ColumnParallel, Fp4LinearModule, RowParallel
from tests import reference


def make(n: int, k: int, seed: int, *, per_row: bool = False, bias: bool = True, block: int = 16) -> Fp4LinearModule:
    random = np.random.default_rng(seed)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0x20, 0x50, (n, -(-k // block)), dtype=np.uint8)
    scale2 = random.uniform(0.01, 0.1, n).astype(np.float32) if per_row else np.float32(0.05)
    values = random.standard_normal(n).astype(np.float32) if bias else None
    return Fp4LinearModule.from_parts(b, scales, scale2, values, block_size=block)


class Mlp(nn.Module):
    def __init__(self, up: Fp4LinearModule, down: Fp4LinearModule) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Any) -> Any:
        return self.down(self.up(x).relu())


class Rank:
    """One process of the group."""

    def __init__(self, rank: int, world: int, device: str, dtype: torch.dtype) -> None:
        self.rank, self.world, self.device, self.dtype = rank, world, device, dtype
        self.mesh = init_device_mesh(device, (world,))
        # The ranks' sums are rounded before they are added.
        self.close = {"rtol": 2e-2, "atol": 5e-2} if dtype != torch.float32 else {"rtol": 2e-4, "atol": 2e-4}

    def x(self, *shape: int) -> torch.Tensor:
        values = np.random.default_rng(7).standard_normal(shape).astype(np.float32)
        return torch.from_numpy(values).to(self.device, self.dtype)

    def share(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        chunks = x.chunk(self.world, dim)
        empty = x.narrow(dim, 0, 0)
        return (chunks[self.rank] if self.rank < len(chunks) else empty).contiguous()

    def to_device(self, module: nn.Module) -> nn.Module:
        return copy.deepcopy(module).to(self.device)

    def column(self, n: int, k: int, **kind: Any) -> None:
        whole = make(n, k, 1, **kind)
        x = self.x(3, 2, k)
        want = self.to_device(whole)(x)
        b, scales, scale2 = whole.layer.canonical()
        rows = np.arange(n)[min(self.rank * -(-n // self.world), n) : min((self.rank + 1) * -(-n // self.world), n)]
        module = parallelize_module(copy.deepcopy(whole), self.mesh, ColumnParallel())
        got = module.layer.canonical()
        assert (got[0] == b[rows]).all() and (got[1] == scales[rows]).all() and module.device.type == self.device
        assert (got[2] == (scale2[rows] if scale2.ndim else scale2)).all()
        torch.testing.assert_close(module(x), self.share(want), **self.close)
        gathered = parallelize_module(copy.deepcopy(whole), self.mesh, ColumnParallel(output_layouts=Replicate()))
        torch.testing.assert_close(gathered(x), want, **self.close)
        dtensor = parallelize_module(copy.deepcopy(whole), self.mesh, ColumnParallel(use_local_output=False))(x)
        assert isinstance(dtensor, DTensor) and dtensor.shape == want.shape
        torch.testing.assert_close(dtensor.full_tensor(), want, **self.close)
        if x.shape[0] % self.world == 0:
            sequence = parallelize_module(copy.deepcopy(whole), self.mesh, ColumnParallel(input_layouts=Shard(0)))
            torch.testing.assert_close(sequence(self.share(x, 0)), self.share(want), **self.close)

    def row(self, n: int, k: int, **kind: Any) -> None:
        whole = make(n, k, 2, **kind)
        x = self.x(3, 2, k)
        want = self.to_device(whole)(x)
        module = parallelize_module(copy.deepcopy(whole), self.mesh, RowParallel())
        y = module(self.share(x))
        torch.testing.assert_close(y, want, **self.close)
        others = [torch.empty_like(y) for _ in range(self.world)]
        dist.all_gather(others, y.contiguous())
        assert all(torch.equal(other, y) for other in others)
        replicated = parallelize_module(copy.deepcopy(whole), self.mesh, RowParallel(input_layouts=Replicate()))
        torch.testing.assert_close(replicated(x), want, **self.close)
        if x.shape[0] % self.world == 0:
            scattered = parallelize_module(copy.deepcopy(whole), self.mesh, RowParallel(output_layouts=Shard(0)))
            torch.testing.assert_close(scattered(self.share(x)), self.share(want, 0), **self.close)
        # The columns of the weight, exactly: one column of the identity at a time.
        if self.device == "cpu":
            identity = torch.eye(k, dtype=torch.float32)
            bias = None if whole.bias is None else whole.bias.detach().clone()
            if whole.bias is not None:
                whole.bias = None
            exact = parallelize_module(copy.deepcopy(whole), self.mesh, RowParallel())
            weight = reference.dequantize(*whole.layer.canonical(), whole.layer.block_size).T.astype(np.float32)
            assert torch.equal(exact(self.share(identity)), torch.from_numpy(weight))
            # Zeros of x leave the bias alone, once.
            if bias is not None:
                assert torch.equal(module(self.share(torch.zeros(1, k))), bias[None])
        try:
            module(self.x(3, 999))
        except ValueError as error:
            assert "this rank's share" in str(error)
        else:
            raise AssertionError("a share of a wrong width was taken")

    def mlp(self, compiled: bool) -> None:
        whole = Mlp(make(96, 64, 3), make(40, 96, 4))
        x = self.x(6, 64).requires_grad_()
        single = self.to_device(whole)
        want = single(x)
        (want_gradient,) = torch.autograd.grad(want.float().square().sum(), x)
        model: Any = copy.deepcopy(whole)
        parallelize_module(model, self.mesh, {"up": ColumnParallel(), "down": RowParallel()})
        assert model.up.out_features == -(-96 // self.world)
        if compiled:
            model = torch.compile(model, backend="aot_eager")
        y = model(x)
        torch.testing.assert_close(y, want, **self.close)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
        scale = want_gradient.abs().max()
        torch.testing.assert_close(gradient / scale, want_gradient / scale, **self.close)
        with torch.no_grad():
            torch.testing.assert_close(model(x), want, **self.close)

    def fused(self) -> None:
        parts = (12, 6, 6)
        whole = make(24, 64, 5, per_row=True)
        x = self.x(4, 64)
        want = torch.cat([self.share(part) for part in self.to_device(whole)(x).split(parts, -1)], -1)
        module = parallelize_module(copy.deepcopy(whole), self.mesh, ColumnParallel(parts=parts))
        torch.testing.assert_close(module(x), want, **self.close)

    def data_parallel(self) -> None:
        """DistributedDataParallel broadcasts the buffers of rank 0, the keys among them, before every forward."""
        base = self.to_device(make(24, 64, self.rank))  # another layer on every rank
        model = nn.Sequential(nn.Linear(64, 64), base).to(self.device, self.dtype)
        parallel = nn.parallel.DistributedDataParallel(model, device_ids=[self.rank] if self.device == "cuda" else None)
        for _ in range(2):
            x = self.x(4, 64)
            y = parallel(x)
            torch.testing.assert_close(y, base.layer.forward(model[0](x).detach()), **self.close)
            y.float().square().mean().backward()
        gradient = model[0].weight.grad
        others = [torch.empty_like(gradient) for _ in range(self.world)]
        dist.all_gather(others, gradient)
        assert gradient.abs().max() > 0 and all(torch.equal(other, gradient) for other in others)

    def refusals(self) -> None:
        for module, style, error, words in [
            (nn.Linear(8, 8), ColumnParallel(), TypeError, "expected an Fp4LinearModule, got Linear"),
            (nn.Linear(8, 8), RowParallel(), TypeError, "expected an Fp4LinearModule, got Linear"),
            (make(8, 16, 1), ColumnParallel(parts=(4, 5)), ValueError, "parts.*9.*expected 8"),
        ]:
            try:
                parallelize_module(module, self.mesh, style)
            except error as caught:
                assert re.search(words, str(caught)), str(caught)
            else:
                raise AssertionError(f"{style} took {module}")

    def everything(self) -> None:
        for n, k in [(64, 64), (37, 96), (2, 64)]:
            self.column(n, k)
        self.column(24, 48, per_row=True, bias=False)
        # Shares on block multiples; inside a block; of an odd number of codes; nothing for the last rank.
        for n, k in [(40, 96), (40, 64), (9, 232), (9, 78), (9, 154), (5, 4)]:
            self.row(n, k)
        self.row(24, 80, per_row=True, bias=False)
        if self.device == "cpu":
            self.row(11, 90, block=7)
            self.row(11, 96, block=32)
        self.mlp(compiled=False)
        self.mlp(compiled=True)
        self.fused()
        self.data_parallel()
        self.refusals()


def run(rank: int, world: int, device: str, store: str) -> None:
    """The body of one process."""
    torch.set_num_threads(1)
    os.environ["FP4LINEAR_NUM_THREADS"] = "1"
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        Rank(rank, world, device, torch.bfloat16 if device == "cuda" else torch.float32).everything()
    finally:
        dist.destroy_process_group()
    if device == "cpu":
        leave()


def leave() -> None:
    """Ends a rank that has succeeded without the interpreter's finalisation.

    torch's meshes keep the gloo group, and so its threads, past destroy_process_group(). One of them may be letting
    the last collective's tensors go, which takes the GIL: Python before 3.14 ends a thread that wants it during
    finalisation by unwinding through gloo's noexcept frames, and the process aborts.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def spawn(world: int, device: str) -> None:
    """Run it in as many processes; an assertion of any of them is raised here."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(run, (world, device, str(Path(directory) / "store")), nprocs=world)
