"""Quantise a PyTorch model in place, save it, load it, and train a LoRA adapter on top of it.

python examples/torch_module.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from fp4linear.torch import Fp4LinearModule, quantize_model

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16
torch.manual_seed(0)


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512), nn.Linear(512, 10))


model = make().to(device, dtype)
x = torch.randn(16, 512, device=device, dtype=dtype)
before = model(x)

# Every nn.Linear but the last becomes an Fp4LinearModule.
report = quantize_model(model, exclude="4", method="four_over_six", progress=False)
print(report)
error = (model(x) - before).float().norm() / before.float().norm()
print(f"relative difference of the outputs: {error.item():.3f}")

# The state_dict holds the canonical NVFP4 tensors, under ModelOpt's names.
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory) / "model.pt"
    torch.save(model.state_dict(), file)
    state = torch.load(file, weights_only=True)
print({name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items() if name.startswith("0.")})

with torch.device("meta"):  # no memory for weights that are replaced at once
    loaded = make()
    for name in ("0", "2"):
        linear = loaded.get_submodule(name)
        loaded[int(name)] = Fp4LinearModule(linear.in_features, linear.out_features)
loaded.load_state_dict(state, assign=True)
assert torch.equal(loaded(x), model(x))


# Gradients flow through a quantised layer to what comes before it and to adapters beside it.
class Lora(nn.Module):
    def __init__(self, base: Fp4LinearModule, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


model.requires_grad_(False)
model[0], model[2] = Lora(model[0]), Lora(model[2])
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
labels = torch.randint(0, 10, (16,), device=device)
first = last = 0.0
for step in range(10):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).float(), labels)
    loss.backward()
    optimizer.step()
    last = loss.item()
    first = last if step == 0 else first
print(f"LoRA on NVFP4 weights: loss {first:.3f} -> {last:.3f}")
assert last < first
