"""A GPU: CUDA-graph replays over distinct weights, torch's matmul beside, the read bandwidth of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .accuracy import Accuracy
from .choice import import_torch
from .device import Checked, Timing, Weight, wanted_path
from .gpu_accuracy import Check
from .gpu_bandwidth import limit_of, read_bandwidth
from .graphs import Call, Graph, alternate, interleave, longer, rotation, weight_sets
from .suites import Item

COLD_BYTES = 250_000_000  # distinct weights of a rotation: four times the L2 cache of an H200
MOST_SETS = 2048  # tiny layers stay below COLD_BYTES: the time to make more of them says nothing about speed
OUT_BYTES = 1 << 30  # of all outputs of a side; launches share them beyond
SEED = 1


@dataclass
class Weights:
    """The weights of one shape. Set i is set 0 with its rows rotated by rows[i], so that a launch that reads the
    weights of another layer shows in its result.
    """

    b: Any
    scales: Any
    layers: list[Any]
    rows: list[int]
    dense: dict[str, list[Any]] = field(default_factory=dict)  # by dtype: [N, K]


@dataclass
class Prepared:
    """An item that is ready to run. Launches take weight sets and outputs in turn."""

    item: Item
    weights: Weights
    path: str | None
    x: Any
    outs: list[Any]
    check: Check
    dense: list[Any]
    dense_outs: list[Any]
    nbytes: int  # of one packed weight
    threads: int | None = None

    @property
    def layers(self) -> list[Any]:
        return self.weights.layers


class Gpu:
    """Weights are made once a shape and kept until another shape is asked for."""

    def __init__(self, index: int = 0, *, dense: bool = True) -> None:
        from fp4linear import _core

        self._dense = dense
        self._torch = import_torch()
        self._torch.cuda.set_device(index)
        self.name = f"cuda:{index}"
        facts = next(device for device in _core.cuda_info()["devices"] if device["index"] == index)
        self.model = str(facts["name"])
        self.limit = limit_of(self.model)
        self._isa = f"sm{facts['sm']}"
        self._kept: dict[tuple[Any, ...], Weights] = {}
        self._bandwidth: tuple[float, str] | None = None

    def prepare(self, item: Item, weight: Weight) -> Prepared:
        if item.isa is not None or item.threads is not None:
            raise ValueError(f"isa and threads: options of the CPU, got {item.isa} and {item.threads} for {self.name}")
        weights = self._weights(item, weight)
        torch = self._torch
        random = torch.Generator(device=self.name).manual_seed(SEED)
        x = torch.randn(item.m, item.k, generator=random, device=self.name).to(getattr(torch, item.dtype))
        dense = self._dense_weights(weights, item) if self._dense else []
        return Prepared(
            item,
            weights,
            wanted_path(weights.layers[0], item),
            x,
            self._outs(item, x, len(weights.layers)),
            Check(torch, weights.b, weights.scales, weight.scale2, x, item.dtype),
            dense,
            self._outs(item, x, len(dense)),
            weight.nbytes,
        )

    def _weights(self, item: Item, weight: Weight) -> Weights:
        key = (item.n, item.k, item.cold, item.path, item.sets)
        if key not in self._kept:
            # The parts of a chain stay together; anything else makes room first.
            if item.sets is None or any(kept[-1] is None for kept in self._kept):
                self._kept.clear()
                self._torch.cuda.empty_cache()
            if self._bandwidth is None:
                self._bandwidth = self._read_bandwidth()
                self._torch.cuda.empty_cache()
            self._kept[key] = self._make(item, weight)
        return self._kept[key]

    def _read_bandwidth(self) -> tuple[float, str]:
        return read_bandwidth(self._torch, self.name)

    def _make(self, item: Item, weight: Weight) -> Weights:
        from fp4linear import Fp4Linear

        count = item.sets or (weight_sets(weight.nbytes, COLD_BYTES, MOST_SETS) if item.cold else 1)
        rows = [index % item.n for index in range(count)]
        # Each set is a window of the weight with its first rows repeated at the end: no copies on the host.
        b, scales = (np.concatenate([part, part[: max(rows)]]) for part in (weight.b, weight.scales))
        layers = [
            Fp4Linear(
                b[first : first + item.n],
                scales[first : first + item.n],
                weight.scale2,
                device=self.name,
                path=item.path,
            )
            for first in rows
        ]
        tensor = partial(self._torch.tensor, device=self.name)
        return Weights(tensor(weight.b), tensor(weight.scales), layers, rows)

    def _dense_weights(self, weights: Weights, item: Item) -> list[Any]:
        if item.dtype not in weights.dense:
            weights.dense.clear()
            self._torch.cuda.empty_cache()
            dtype = getattr(self._torch, item.dtype)
            nbytes = item.n * item.k * dtype.itemsize
            count = item.sets or (weight_sets(nbytes, COLD_BYTES, MOST_SETS) if item.cold else 1)
            weights.dense[item.dtype] = [
                self._torch.randn(item.n, item.k, dtype=dtype, device=self.name) for _ in range(count)
            ]
        return weights.dense[item.dtype]

    def _outs(self, item: Item, x: Any, sets: int) -> list[Any]:
        """NaN: what a kernel forgets to write shows."""
        nbytes = item.m * item.n * x.element_size()
        count = min(sets, max(2, OUT_BYTES // nbytes))
        return [self._torch.full((item.m, item.n), float("nan"), dtype=x.dtype, device=self.name) for _ in range(count)]

    def verify(self, prepared: Prepared) -> Checked:
        """One eager call of the last weight set."""
        layer = prepared.layers[-1]
        y = layer.forward(prepared.x)
        path = layer.last_path
        return Checked(prepared.check.compare([(y, prepared.weights.rows[-1])]), path, self._isa)

    def time(self, parts: Sequence[Prepared], seconds: float) -> Timing:
        """Replays of ours and of the dense graph in turns; then every output of a last replay of ours is checked."""
        chain = parts[0].item.sets is not None
        ours, launches = self._graph(parts, chain, dense=False)
        sides = {"ours": ours}
        if self._dense:
            sides["dense"], _ = self._graph(parts, chain, dense=True)
        samples = alternate(sides, seconds)
        accuracy = self._check_replay(parts, ours, launches)
        read = sum(part.nbytes * len(part.layers) for part in parts)
        bandwidth, reader = self._bandwidth or (None, "")
        weights = "hot" if not parts[0].item.cold else "cold" if read >= COLD_BYTES else "L2"
        return Timing(
            samples["ours"],
            samples.get("dense"),
            f"torch {self._torch.__version__} matmul in the dtype of x, as a CUDA graph",
            bandwidth if weights == "cold" else None,
            sum(len(part.layers) for part in parts),
            weights=weights,
            launches=len(launches),
            bandwidth_by=reader,
            accuracy=accuracy,
        )

    def _graph(self, parts: Sequence[Prepared], chain: bool, *, dense: bool) -> tuple[Graph, list[tuple[int, int]]]:
        """The graph and its launches, (part, number in the part). A chain is one graph and one sample; a rotation of
        one layer is as long as a good measurement needs, and its samples are those of a launch.
        """
        if chain:
            launches = interleave([len(part.layers) for part in parts])
            return self._capture([self._call(parts, launch, dense) for launch in launches], 1), launches
        count = rotation(len(parts[0].dense if dense else parts[0].layers))
        calls = [self._call(parts, (0, index), dense) for index in range(count)]
        graph = self._capture(calls, count)
        wanted = longer(count, graph.seconds)
        if wanted > count:
            calls = [self._call(parts, (0, index), dense) for index in range(wanted)]
            graph = self._capture(calls, wanted)
        return graph, [(0, index) for index in range(wanted)]

    def _capture(self, calls: Sequence[Call], share: int) -> Graph:
        return Graph(self._torch, calls, share)

    def _call(self, parts: Sequence[Prepared], launch: tuple[int, int], dense: bool) -> Call:
        part, index = parts[launch[0]], launch[1]
        if dense:
            weight = part.dense[index % len(part.dense)].t()
            return partial(self._torch.mm, part.x, weight, out=part.dense_outs[index % len(part.dense_outs)])
        layer, out = part.layers[index % len(part.layers)], part.outs[index % len(part.outs)]
        return partial(forward, layer, part.x, out, part.path)

    def _check_replay(self, parts: Sequence[Prepared], ours: Graph, launches: Sequence[tuple[int, int]]) -> Accuracy:
        for part in parts:
            for out in part.outs:
                out.fill_(float("nan"))
        ours.replay()
        written = last_writers(launches, [len(part.outs) for part in parts])
        found = [
            part.check.compare((out, part.weights.rows[writer % len(part.layers)]) for out, writer in outs)
            for part, outs in ((p, list(zip(p.outs, w, strict=True))) for p, w in zip(parts, written, strict=True))
        ]
        return max(found, key=lambda accuracy: accuracy.tolerance_used)


def forward(layer: Any, x: Any, out: Any, path: str | None) -> None:
    """RuntimeError where another path ran; also while a graph is captured."""
    layer.forward(x, out=out)
    if layer.last_path != path:
        raise RuntimeError(f"path: {layer.last_path} ran in the graph, expected {path}")


def last_writers(launches: Sequence[tuple[int, int]], outs: Sequence[int]) -> list[list[int]]:
    """For each output of each part, the number of the launch in its part that wrote it last. All have one: there are
    no more outputs than weight sets, and a graph launches each set.
    """
    last: list[dict[int, int]] = [{} for _ in outs]
    for part, index in launches:
        last[part][index % outs[part]] = index
    return [[writers[out] for out in range(count)] for writers, count in zip(last, outs, strict=True)]
