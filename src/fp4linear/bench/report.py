"""Results as a table, as JSON lines and as a picture."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .runner import Record

if TYPE_CHECKING:
    from rich.table import Table

SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def table(records: Sequence[Record]) -> Table:
    """One line a measurement. of BW: of the read bandwidth measured around it; of limit: of that recorded for the model
    of GPU; tol.: of the contract's tolerance.
    """
    from rich import box
    from rich.table import Table

    labelled = any(record.label for record in records)
    threaded = any(record.threads for record in records)
    limited = any(record.limit_share for record in records)
    unit, per, digits = ("G", 1, 1) if all(record.device == "cpu" for record in records) else ("T", 1000, 2)
    columns = [
        *(["layer"] if labelled else []),
        "N x K",
        "M",
        "x",
        *(["thr"] if threaded else []),
        "weights",
        "path",
        "us",
        f"{unit}B/s",
        "of BW",
        *(["of limit"] if limited else []),
        f"{unit}FLOP/s",
        "dense us",
        "gain",
        "tol.",
    ]
    result = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in result.columns:
        column.justify = "right"
        column.no_wrap = True
    for r in records:
        cells = [
            *([r.label] if labelled else []),
            f"{r.n}x{r.k}" if r.n else f"{r.launches} calls",
            str(r.m),
            SHORT[r.dtype],
            *([str(r.threads or "")] if threaded else []),
            r.weights,
            r.path or "none",
            f"{r.us:.{digits}f}",
            f"{r.gb_s / per:.{digits}f}",
            f"{r.bandwidth_share:.0%}" if r.bandwidth_share else "",
            *([f"{r.limit_share:.0%}" if r.limit_share else ""] if limited else []),
            f"{r.gflop_s / per:.{digits - 1}f}",
            f"{r.dense_us:.{digits}f}" if r.dense_us else "",
            f"{r.dense_ratio:.2f}x" if r.dense_ratio else "",
            f"{r.tolerance_used:.2f}" if r.good else f"[red]{r.tolerance_used:.2f}[/]",
        ]
        result.add_row(*cells)
    return result


def write_json_lines(records: Sequence[Record], file: IO[str]) -> None:
    for record in records:
        file.write(json.dumps(record.as_dict()) + "\n")


def plot(records: Sequence[Record], path: Path) -> None:
    """Latency over M, and the share of the read bandwidth where it was measured, as a PNG."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plot: needs matplotlib: pip install 'fp4linear[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        shape = f"{r.n}x{r.k}" if r.n else r.label
        lines[f"{shape} {SHORT[r.dtype]} {r.weights}"].append(r)
    rows = sorted({r.m for r in records})
    figure, (latency, share) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for index, (name, line) in enumerate(lines.items()):
        line = sorted(line, key=lambda r: r.m)
        colour = f"C{index % 10}"
        latency.plot([r.m for r in line], [r.us for r in line], "o-", color=colour, label=name)
        dense = [(r.m, r.dense_us) for r in line if r.dense_us]
        if dense:
            latency.plot(*zip(*dense, strict=True), "x:", color=colour)
        shares = [(r.m, r.bandwidth_share) for r in line if r.bandwidth_share]
        if shares:
            share.plot(*zip(*shares, strict=True), "o-", color=colour, label=name)
    latency.set(xscale="log", yscale="log", xlabel="M", ylabel="us a call", title="NVFP4 (solid), dense (dotted)")
    share.set(xscale="log", xlabel="M", ylabel="packed bytes / read bandwidth", title="Share of the read bandwidth")
    share.set_ylim(0, 1.1)
    share.axhline(1, color="grey", linewidth=0.8)
    for axes in (latency, share):
        axes.grid(alpha=0.3)
        axes.set_xticks(rows, [str(m) for m in rows])
        axes.minorticks_off()
        if axes.lines and axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
