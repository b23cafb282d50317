"""`fp4linear inspect`: the quantised layers of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import make_console
from .convert import FormatOption, NibblesOption, SwizzledOption

if TYPE_CHECKING:
    from fp4linear.files import FileReport, LayerReport

SHOWN_GROUPS = 4  # of layers whose global scales differ


def command(
    file: Annotated[Path, typer.Argument(help="A .safetensors or GGUF file, an index, or a directory with one.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    format_: FormatOption = None,
    swizzled: SwizzledOption = None,
    nibbles: NibblesOption = None,
) -> None:
    """Formats, shapes, global scales, odd scale bytes, awkward sizes and paths of the NVFP4 layers in a file."""
    from fp4linear import files

    report = files.inspect(
        file, format=format_, swizzled=swizzled, nibbles=nibbles.value if nibbles is not None else None
    )
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        show(report)


def show(report: FileReport) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = make_console()
    readable = [layer for layer in report.layers if layer.problem is None]
    places = list(readable[0].paths) if readable else []
    on_cpu, on_gpus = ([where for where in places if ("cuda" in where) is gpu] for gpu in (False, True))
    table = Table(
        "layer", "format", "N x K", "global scale", "NaN", "zero", "awkward", *(f"path {where}" for where in on_cpu),
        box=box.SIMPLE_HEAD,
    )  # fmt: skip
    table.columns[0].overflow = "fold"
    for column in table.columns[2:6]:
        column.justify = "right"
    for layer in readable:
        table.add_row(
            escape(layer.name),
            layer.format,
            f"{layer.out_features} x {layer.in_features}",
            global_scale(layer),
            f"[red]{layer.nan_scales}[/]" if layer.nan_scales else "0",
            str(layer.zero_scales),
            " ".join(layer.awkward),
            *(layer.paths[where] or "none" for where in on_cpu),
        )
    if readable:
        console.print(table)
    if on_gpus:  # a line for each shape: nothing else decides
        gpus = Table("N x K", *on_gpus, title="Paths on GPUs (bf16)", title_justify="left", box=box.SIMPLE_HEAD)
        for layer in {(layer.out_features, layer.in_features): layer for layer in readable}.values():
            names = (layer.paths[where] or "none" for where in on_gpus)
            gpus.add_row(f"{layer.out_features} x {layer.in_features}", *names)
        console.print(gpus)
    for layer in report.layers:
        if layer.problem is not None:
            console.print(f"[red]can't load[/] {escape(layer.name)} ({layer.format}): {escape(layer.problem)}")
    for layer in readable:
        for note in layer.notes:
            console.print(f"[yellow]note[/] {escape(layer.name)}: {escape(note)}")
    for group in report.mismatched[:SHOWN_GROUPS]:
        scales = ", ".join(f"{escape(name)} {scale:.6g}" for name, scale in group.items())
        console.print(
            f"[yellow]global scales differ[/]: {scales}. Fuse them with one scale2 a row (load with a list of names)."
        )
    if len(report.mismatched) > SHOWN_GROUPS:
        console.print(f"... and in {len(report.mismatched) - SHOWN_GROUPS} more groups (--json has them all)")
    total = sum(layer.packed_bytes for layer in readable)
    console.print(
        f"{escape(report.source)}: {len(readable)} NVFP4 layers, {total / 1e6:.1f} MB packed"
        + (f"; {len(report.layers) - len(readable)} that can't be loaded" if len(readable) < len(report.layers) else "")
    )


def global_scale(layer: LayerReport) -> str:
    if layer.scale2_min is None or layer.scale2_max is None:
        return ""
    if layer.scale2_min == layer.scale2_max:
        return f"{layer.scale2_max:.4g}"
    return f"{layer.scale2_min:.4g}..{layer.scale2_max:.4g}"
