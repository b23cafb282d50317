"""`fp4linear demo`: a real model with NVFP4 layers, checked and timed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .console import make_console
from .quantize import Method


def command(
    method: Annotated[Method, typer.Option(help="How block scales are chosen.")] = Method.mse,
    output: Annotated[Path | None, typer.Option(help="Keep the NVFP4 file here; otherwise it is temporary.")] = None,
    every: Annotated[bool, typer.Option("--all", help="A line for every layer, not one a shape.")] = False,
    sentence: Annotated[list[str] | None, typer.Option(help="A sentence to embed; repeatable.")] = None,
) -> None:
    """Quantise a sentence encoder (MiniLM) to NVFP4, run it, and compare with the float model.

    Exit status 1 where any layer leaves the contract's tolerance.
    """
    from fp4linear import demo

    good = demo.run(method=method.value, output=output, every_layer=every, sentences=sentence, console=make_console())
    sys.exit(0 if good else 1)
