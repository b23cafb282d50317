"""The CPU: NumPy arrays, NumPy's float32 matmul beside, the read bandwidth of the same run."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .accuracy import measure
from .blas import blas_threads
from .device import Checked, Timing, Weight
from .suites import Item
from .timing import Samples, alternate

COLD_BYTES = 500_000_000  # distinct weights that a cold pass reads: far more than any cache holds
BANDWIDTH_BYTES = 1 << 29
BANDWIDTH_REPEATS = 5
COLD_PARTS = 3


@dataclass
class Prepared:
    """An item that is ready to run."""

    item: Item
    weight: Weight
    threads: int
    layers: list[Any]
    x: npt.NDArray[Any]
    x32: npt.NDArray[np.float32]
    dense: list[npt.NDArray[np.float32]]  # [K, N] views of [N, K]


class Cpu:
    """Layers are built once a shape and kept until another shape is asked for."""

    name = "cpu"
    limit: float | None = None

    def __init__(self, *, dense: bool = True) -> None:
        self._dense = dense
        self.model = platform.processor() or platform.machine()
        self._kept: tuple[Any, list[Any], list[npt.NDArray[np.float32]]] = (None, [], [])

    def prepare(self, item: Item, weight: Weight) -> Prepared:
        from fp4linear import _core

        if item.sets is not None:
            raise ValueError("device: a chain of layers is timed as a CUDA graph, got cpu")
        threads = item.threads or _core.default_threads()
        key = (item.n, item.k, item.cold, threads, item.path, item.isa)
        if self._kept[0] != key:
            self._kept = (None, [], [])  # free the old ones first
            self._kept = (key, self._layers(item, weight, threads), self._dense_weights(item, weight))
        _, layers, dense = self._kept
        x32 = np.random.default_rng(1).standard_normal((item.m, item.k), dtype=np.float32)
        x = x32.astype(numpy_dtype(item.dtype))
        return Prepared(item, weight, threads, layers, x, x.astype(np.float32), dense)

    def _layers(self, item: Item, weight: Weight, threads: int) -> list[Any]:
        from fp4linear import Fp4Linear

        # Distinct memory is what keeps them cold; equal contents do no harm.
        count = -(-COLD_BYTES // weight.nbytes) if item.cold else 1
        return [
            Fp4Linear(weight.b, weight.scales, weight.scale2, path=item.path, isa=item.isa, threads=threads)
            for _ in range(count)
        ]

    def _dense_weights(self, item: Item, weight: Weight) -> list[npt.NDArray[np.float32]]:
        from fp4linear import dequantize

        if not self._dense:
            return []
        first = dequantize(weight.b, weight.scales, weight.scale2)
        count = -(-COLD_BYTES // first.nbytes) if item.cold else 1
        return [first.T, *(first.copy().T for _ in range(count - 1))]

    def result(self, prepared: Prepared) -> tuple[npt.NDArray[Any], npt.NDArray[Any], str | None, str]:
        """x, y, path and instruction set of one call."""
        from fp4linear import _core

        layer = prepared.layers[-1]
        y = layer.forward(prepared.x)
        return prepared.x, y, layer.last_path, _core.last_isa()

    def verify(self, prepared: Prepared) -> Checked:
        x, y, path, isa = self.result(prepared)
        weight = prepared.weight
        return Checked(measure(x, y, weight.b, weight.scales, weight.scale2, sample=True), path, isa)

    def time(self, parts: Sequence[Prepared], seconds: float) -> Timing:
        (prepared,) = parts
        sides: dict[str, Any] = {"ours": [partial(layer.forward, prepared.x) for layer in prepared.layers]}
        if prepared.dense:
            sides["dense"] = [partial(np.matmul, prepared.x32, w) for w in prepared.dense]
        with blas_threads(prepared.threads) as limited:
            if prepared.item.cold:
                samples, bandwidth = self._time_cold(prepared, sides, seconds)
            else:
                samples, bandwidth = alternate(sides, seconds), None
        what = f"numpy float32, threads: {prepared.threads}" if limited else "numpy float32, threads: not set"
        weights = "cold" if prepared.item.cold else "hot"
        return Timing(samples["ours"], samples.get("dense"), what, bandwidth, len(prepared.layers), weights)

    def _time_cold(self, prepared: Prepared, sides: Any, seconds: float) -> tuple[dict[str, Samples], float]:
        """Samples, and the bandwidth measured before, between and after them: both drift on a shared machine."""
        bandwidths = [self._bandwidth(prepared.threads)]
        samples: dict[str, Samples] = {}
        for _ in range(COLD_PARTS):
            part = alternate(sides, seconds / COLD_PARTS, cold=True, min_rounds=2)
            for name in part:
                if name in samples:
                    samples[name].extend(part[name])
                else:
                    samples[name] = part[name]
            bandwidths.append(self._bandwidth(prepared.threads))
        return samples, statistics.median(bandwidths)

    def _bandwidth(self, threads: int) -> float:
        from fp4linear import _core

        return float(_core.read_bandwidth(BANDWIDTH_BYTES, threads, BANDWIDTH_REPEATS))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype; bfloat16 needs ml_dtypes. ValueError, with what to install, where it is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError("dtype: bfloat16 in NumPy needs ml_dtypes: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype
