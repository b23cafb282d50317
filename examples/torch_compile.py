"""torch.compile over NVFP4 layers, without a graph break.

    python examples/torch_compile.py [backend]

The backend is "inductor" by default, which needs a C++ compiler on the CPU.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from fp4linear.torch import quantize_model

device = "cuda" if torch.cuda.is_available() else "cpu"
backend = sys.argv[1] if len(sys.argv) > 1 else "inductor"
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.gate = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


model = nn.Sequential(*(Block(256) for _ in range(4))).to(device, torch.bfloat16).eval()
quantize_model(model, exclude=(), progress=False)
x = torch.randn(4, 256, device=device, dtype=torch.bfloat16)

with torch.inference_mode():
    eager = model(x)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), eager, rtol=5e-2, atol=5e-2)

# Block by block as well: no layer is a constant of the graph, so equal blocks share one.
for block in model:
    block.compile(fullgraph=True, backend=backend)
with torch.inference_mode():
    torch.testing.assert_close(model(x), eager, rtol=5e-2, atol=5e-2)
print(f"compiled with {backend}: the whole model, and its {len(model)} blocks one by one")
