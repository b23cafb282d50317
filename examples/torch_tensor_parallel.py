"""An NVFP4 MLP over several processes: the first layer split by columns, the second by rows, one all-reduce.

    torchrun --nproc-per-node 2 examples/torch_tensor_parallel.py

On GPUs through NCCL where every process has one, else on the CPU through gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from fp4linear.torch import ColumnParallel, RowParallel, quantize_model

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if "RANK" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
device = "cuda" if torch.cuda.device_count() >= world else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if device == "cuda" else "gloo")

torch.manual_seed(0)  # the same weights and x on every rank
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).bfloat16()
quantize_model(model, exclude=(), progress=False)
x = torch.randn(4, 256, dtype=torch.bfloat16)
single = model(x)

mesh = init_device_mesh(device, (world,))
parallelize_module(model, mesh, {"0": ColumnParallel(), "2": RowParallel()})
y = model(x.to(device))
torch.testing.assert_close(y.cpu(), single, rtol=5e-2, atol=5e-2)
print(f"rank {rank} of {world} on {device}: {model[0].out_features} of 1024 columns, y agrees")
dist.destroy_process_group()
if device == "cpu":
    # gloo's threads live as long as the mesh; one that lets a tensor go while Python finalises aborts the process.
    sys.stdout.flush()
    os._exit(0)
