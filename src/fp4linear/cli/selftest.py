"""`fp4linear selftest`: checks to run on hardware that this project could not run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .console import make_console

FAILED, CANNOT_RUN = 1, 3


def command(
    native: Annotated[
        bool, typer.Option("--native", help="The NVFP4 x NVFP4 path of Blackwell GPUs (native_nvfp4).")
    ] = False,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="The same checks with the path native_emulated: on a GPU, else the CPU.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "",
    output: Annotated[Path, typer.Option("--json", help="Where the report goes.")] = Path("fp4linear-selftest.json"),
) -> None:
    """Run a path against its float64 reference on this machine, and write a report to send back.

    Exit status: 0 all checks passed, 1 some failed, 3 the path can't run here.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from fp4linear import _core, _selftest

    if not native:
        raise ValueError("selftest: expected --native, the one path that has a self-test")
    path = "native_emulated" if emulate else "native_nvfp4"
    where = device or ("cpu" if emulate and not _core.cuda_info()["devices"] else "cuda")
    console = make_console()
    if why := _selftest.unavailable(where, path):
        console.print(f"{path} can't run on {where}: {escape(why)}")
        raise typer.Exit(CANNOT_RUN)
    results = []
    table = Table("", "check", "", box=box.SIMPLE_HEAD)
    for result in _selftest.checks(where, path):
        results.append(result)
        mark = "[green]passed[/]" if result.passed else "[red]FAILED[/]"
        table.add_row(mark, escape(result.name), escape(result.detail))
    times = _selftest.timings(where, path)
    console.print(table)
    for name, milliseconds in times.items():
        console.print(f"{name}: {milliseconds:.3f} ms")
    output.write_text(json.dumps(_selftest.report(where, path, results, times), indent=2) + "\n", encoding="utf-8")
    failed = sum(not result.passed for result in results)
    console.print(f"{len(results) - failed} of {len(results)} checks passed; report: {escape(str(output))}")
    if failed:
        raise typer.Exit(FAILED)
