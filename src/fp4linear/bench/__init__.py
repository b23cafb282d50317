"""Accuracy and latency of layers, each beside a dense matmul in the same run. `fp4linear bench` is its command."""

from __future__ import annotations

from .accuracy import Accuracy, measure
from .runner import Record, run
from .suites import MODELS, Item, Part, suite

__all__ = ["MODELS", "Accuracy", "Item", "Part", "Record", "measure", "run", "suite"]
