"""What a checkpoint holds, layer by layer, and what will be awkward about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from .checkpoint import Tensors, open_tensors
from .converting import chosen
from .errors import FormatError
from .formats.base import Asked, Format
from .formats.registry import find_layers
from .loading import Source, checked, problem_of

# Endings of layers that runtimes fuse into one matmul; each group is a tuple.
FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)


@dataclass
class LayerReport:
    """One layer. paths: from "M=1" (the CPU) and "cuda:0, M=1" to the path on this machine; awkward: dims that cost
    speed; notes: what a caller must know to use it.
    """

    name: str
    format: str
    problem: str | None
    out_features: int | None = None
    in_features: int | None = None
    packed_bytes: int = 0
    scale2_min: float | None = None
    scale2_max: float | None = None
    nan_scales: int = 0
    zero_scales: int = 0
    awkward: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    paths: dict[str, str | None] = field(default_factory=dict)


@dataclass
class FileReport:
    """A checkpoint: its quantised layers, and groups that are fused elsewhere though their global scales differ."""

    source: str
    layers: list[LayerReport]
    mismatched: list[dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists, ready for JSON."""
        return asdict(self)


def inspect(
    source: Source,
    *,
    rows: Iterable[int] = (1, 64),
    format: str | None = None,
    swizzled: bool | None = None,
    nibbles: Literal["low", "high"] | None = None,
) -> FileReport:
    """What a checkpoint holds, with every layer's scales read: layers that can't be loaded are listed with the reason.

    Args:
        source: as for `load`.
        rows: the values of M whose paths to report.
        format, swizzled, nibbles: as for `load`, for the layers that leave a doubt.

    Raises:
        FormatError: a damaged file. ValueError, TypeError: as `load` does.

    Example:
        >>> import numpy as np, fp4linear
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> tensors = {"up.weight": q.b, "up.weight_scale": q.scales, "up.weight_scale_2": q.scale2}
        >>> report = fp4linear.files.inspect(tensors).layers[0]
        >>> report.format, report.out_features, report.in_features, report.nan_scales, report.zero_scales
        ('modelopt', 4, 16, 0, 0)
    """
    tensors = open_tensors(source)
    asked, counts = checked(format, swizzled, nibbles), tuple(rows)
    reports = [inspect_layer(tensors, name, found, asked, counts) for name, found in find_layers(tensors).items()]
    return FileReport(tensors.source, reports, mismatched_globals(reports))


def inspect_layer(tensors: Tensors, name: str, claimed: Format, asked: Asked, rows: tuple[int, ...]) -> LayerReport:
    found, said = chosen(tensors, name, claimed, asked)
    report = LayerReport(name, found.name, problem_of(tensors, name, found, said, awq=True))
    if (shape := found.shape(tensors, name)) is not None:
        report.out_features, report.in_features = shape
    if report.problem is not None:
        return report
    try:
        part = found.read(tensors, name, said)
    except FormatError as error:
        report.problem = str(error)
        return report
    if part.pre_quant_scale is not None:
        report.notes.append("pre_quant_scale multiplies x: fp4linear.files.load_awq")
    n, k = part.b.shape[0], 2 * part.b.shape[1]
    magnitude = part.scales & 0x7F  # E4M3: 0x7F is NaN with either sign
    report.packed_bytes = part.b.nbytes + part.scales.nbytes
    if part.scale2.size:
        report.scale2_min, report.scale2_max = float(part.scale2.min()), float(part.scale2.max())
    report.nan_scales = int(np.count_nonzero(magnitude == 0x7F))
    report.zero_scales = int(np.count_nonzero(magnitude == 0))
    report.awkward = [f"K%{d}={k % d}" for d in (16, 32, 128) if k % d] + ([f"N%128={n % 128}"] if n % 128 else [])
    report.paths = {f"M={m}": path_here(k, m) for m in rows} | paths_of_gpus(n, k, rows)
    return report


def path_here(k: int, m: int) -> str | None:
    """The path that a layer of `in_features` = k takes on this machine's CPU, whatever its out_features > 0 are."""
    from fp4linear import Fp4Linear

    probe = Fp4Linear(np.zeros((1, k // 2), np.uint8), np.zeros((1, -(-k // 16)), np.uint8), 1.0)
    return probe.plan(m).path


def paths_of_gpus(n: int, k: int, rows: tuple[int, ...]) -> dict[str, str | None]:
    """From "cuda:0, M=1" and so on to the path that a bf16 call takes there under default switches.

    Asks the planner, not the device: no memory is taken there and no CUDA context made. Of equal GPUs the first speaks.
    """
    from fp4linear import _core

    paths: dict[str, str | None] = {}
    kinds: set[tuple[int, int]] = set()
    for device in _core.cuda_info()["devices"]:
        kind = device["sm"], device["sm_count"]
        if kind in kinds:
            continue
        kinds.add(kind)
        for m in rows:
            plan = _core.plan(n, k, m, device=f"sm{device['sm']}", sm_count=device["sm_count"])
            paths[f"cuda:{device['index']}, M={m}"] = plan.path
    return paths


def mismatched_globals(reports: Iterable[LayerReport]) -> list[dict[str, float]]:
    """Groups such as q, k, v of one attention whose global scales are not the same."""
    groups: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for report in reports:
        parent, _, last = report.name.rpartition(".")
        for index, endings in enumerate(FUSED):
            if last in endings and report.scale2_max is not None:
                groups[parent, index][report.name] = report.scale2_max
    return [group for group in groups.values() if len(set(group.values())) > 1]
