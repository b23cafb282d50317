"""The command `fp4linear`. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import sys

import typer

from . import bench, convert, demo, info, inspect, quantize, selftest

app = typer.Typer(
    name="fp4linear",
    help="NVFP4 linear layers: look at files and machines, quantise, convert, check and time.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("demo")(demo.command)
app.command("info")(info.command)
app.command("inspect")(inspect.command)
app.command("quantize")(quantize.command)
app.command("convert")(convert.command)
app.command("bench")(bench.command)
app.command("selftest")(selftest.command)


def main() -> None:
    """Runs the command line; expected errors become one line on stderr and exit status 1."""
    try:
        app()
    except (ValueError, TypeError, OSError) as error:  # FormatError is a ValueError
        print(f"fp4linear: error: {error}", file=sys.stderr)
        sys.exit(1)
