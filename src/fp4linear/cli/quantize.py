"""`fp4linear quantize`: float weights to a ModelOpt-style NVFP4 file."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import make_console

if TYPE_CHECKING:
    from fp4linear.files import QuantizedLayer


class Method(str, Enum):
    max_abs = "max_abs"
    four_over_six = "four_over_six"
    mse = "mse"


def command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Float weights: a .safetensors file or an index.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")],
    method: Annotated[Method, typer.Option(help="How block scales are chosen.")] = Method.max_abs,
    include: Annotated[
        list[str] | None, typer.Option(help="Glob of layers to quantise, instead of the default choice; repeatable.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Glob of layers to leave alone; repeatable.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT where it exists.")] = False,
) -> None:
    """Quantise the 2-D float weights (F32, F16, BF16) of a file to NVFP4; other tensors are copied unchanged.

    Embeddings, norms, lm_head and MoE routers stay as they are unless --include names them.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from fp4linear import files

    tensors = files.open_tensors(source)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("quantising", total=sum(tensors.info(name).nbytes for name in tensors))
        layers = files.quantize_file(
            tensors,
            destination,
            method=method.value,
            include=include or (),
            exclude=exclude or (),
            force=force,
            progress=lambda name, nbytes: progress.update(task, advance=nbytes, description=name[-40:]),
        )
    show(layers, tensors.source, destination)


def show(layers: list[QuantizedLayer], source: str, destination: Path) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = make_console()
    table = Table("layer", "N x K", "MB before", "after", "relative error", "max abs error", box=box.SIMPLE_HEAD)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in layers:
        table.add_row(
            escape(layer.name),
            f"{layer.out_features} x {layer.in_features}",
            f"{layer.bytes_before / 1e6:.2f}",
            f"{layer.bytes_after / 1e6:.2f}",
            f"{layer.relative_error:.4f}",
            f"{layer.max_abs_error:.4g}",
        )
    console.print(table)
    before, after = sum(layer.bytes_before for layer in layers), sum(layer.bytes_after for layer in layers)
    console.print(
        f"{escape(source)} -> {escape(str(destination))}: {len(layers)} layers, {before / 1e6:.1f} MB -> "
        f"{after / 1e6:.1f} MB ({before / after:.2f} x smaller)"
    )
