"""Runs a piece of Python in a fresh interpreter: for what a process can only do once or must not share."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_child(
    code: str, *, timeout: float = 300, check: bool = True, arguments: tuple[str, ...] = (), **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """stdout, stderr and the exit code of `code`, with no FP4LINEAR_* switch but those given (None removes one).

    The timeout only turns a hang into a failure. The tests package is importable in the child.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FP4LINEAR_")}
    for name, value in environment.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value
    preamble = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", preamble + textwrap.dedent(code), *arguments],
        env=kept,
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT / "tests",
    )
    if check:
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
