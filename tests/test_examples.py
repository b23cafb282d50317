"""Every program of examples/ runs. One that cannot, for want of a GPU, says `skipped: reason`; torch_*.py have tests of
their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "examples"
MARKS = {"jax": pytest.mark.jax, "torch": pytest.mark.torch}  # by the first word of the name
PROGRAMS = [path for path in sorted(FOLDER.glob("*.py")) if not path.name.startswith("torch_")]


@pytest.mark.parametrize(
    "program", [pytest.param(p, id=p.stem, marks=MARKS.get(p.stem.split("_")[0], ())) for p in PROGRAMS]
)
def test_it_runs(program: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FP4LINEAR_") and name != "XLA_FLAGS"
    }
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=600, cwd=FOLDER
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if done.stdout.startswith("skipped: "):
        pytest.skip(done.stdout.strip())
    assert done.stdout, "an example shows what it did"


def test_there_are_examples() -> None:
    assert len(PROGRAMS) >= 4
