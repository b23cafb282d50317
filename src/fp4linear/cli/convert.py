"""`fp4linear convert`: NVFP4 layers from one file format to another."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import make_console

if TYPE_CHECKING:
    from fp4linear.files import ConvertedLayer

SHOWN_LAYERS = 40


class Target(str, Enum):
    modelopt = "modelopt"
    compressed_tensors = "compressed-tensors"
    comfyui = "comfyui"
    torchao = "torchao"


class Nibbles(str, Enum):
    low = "low"
    high = "high"


FormatOption = Annotated[
    str | None, typer.Option("--format", help="The format of IN, for layers whose tensors leave a doubt.")
]
SwizzledOption = Annotated[
    bool | None, typer.Option("--swizzled/--plain", help="How block scales lie, where the tensors leave a doubt.")
]
NibblesOption = Annotated[
    Nibbles | None, typer.Option(help="The nibble of a byte that holds the even k, where the tensors leave a doubt.")
]


def command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .safetensors or GGUF file, an index, a directory.")],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The .safetensors file to write.")],
    to: Annotated[Target, typer.Option("--to", help="The format to write.")],
    format_: FormatOption = None,
    swizzled: SwizzledOption = None,
    nibbles: NibblesOption = None,
    allow_rounding: Annotated[
        bool, typer.Option("--allow-rounding", help="compressed-tensors: the nearest divisor where none is exact.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT where it exists.")] = False,
) -> None:
    """Write the NVFP4 layers of a file in another format, bit for bit; other tensors are copied unchanged.

    What the target can't hold is an error. OUT appears when it is complete.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from fp4linear import files

    tensors = files.open_tensors(source)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=make_console(stderr=True), transient=True) as progress:
        task = progress.add_task("converting", total=sum(tensors.info(name).nbytes for name in tensors))
        layers = files.convert_file(
            tensors,
            destination,
            to.value,
            format=format_,
            swizzled=swizzled,
            nibbles=nibbles.value if nibbles is not None else None,
            rounding=allow_rounding,
            force=force,
            progress=lambda name, nbytes: progress.update(task, advance=nbytes, description=name[-40:]),
        )
    show(layers, tensors.source, destination, to.value)


def show(layers: list[ConvertedLayer], source: str, destination: Path, to: str) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    console = make_console()
    table = Table("layer", "N x K", "from", "", box=box.SIMPLE_HEAD)
    table.columns[0].overflow = "fold"
    for layer in layers[:SHOWN_LAYERS]:
        table.add_row(
            escape(layer.name),
            f"{layer.out_features} x {layer.in_features}",
            layer.source_format,
            "[yellow]global scale rounded[/]" if layer.rounded else "",
        )
    console.print(table)
    if len(layers) > SHOWN_LAYERS:
        console.print(f"... and {len(layers) - SHOWN_LAYERS} more")
    rounded = sum(layer.rounded for layer in layers)
    console.print(
        f"{escape(source)} -> {escape(str(destination))}: {len(layers)} layers as {to}"
        + (f", {rounded} with a rounded global scale" if rounded else ", every bit kept")
    )
