"""The examples of examples/torch_*.py run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch
EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command: str) -> str:
    environment = os.environ | {"FP4LINEAR_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sees_a_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def test_module() -> None:
    assert "LoRA on NVFP4 weights: loss" in run(str(EXAMPLES / "torch_module.py"))


def test_compile() -> None:
    assert "compiled with aot_eager" in run(str(EXAMPLES / "torch_compile.py"), "aot_eager")


@pytest.mark.gpu
def test_compile_by_inductor() -> None:
    assert "compiled with inductor" in run(str(EXAMPLES / "torch_compile.py"))


def test_cuda_graph() -> None:
    assert ("graph" if sees_a_gpu() else "skipped") in run(str(EXAMPLES / "torch_cuda_graph.py"))


def test_tensor_parallel() -> None:
    if importlib.util.find_spec("torch.distributed.run") is None:
        pytest.skip("this torch has no torch.distributed")
    output = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(EXAMPLES / "torch_tensor_parallel.py"),
    )  # fmt: skip
    assert "rank 0 of 2" in output and "rank 1 of 2" in output and "512 of 1024 columns" in output
