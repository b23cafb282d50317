"""Where the commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LEAST_WIDTH = 124  # columns that the tables need: better a terminal that wraps lines than cells cut short


def make_console(*, stderr: bool = False) -> Console:
    """A rich console that is wide enough for the tables, whatever it prints to."""
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    console.width = max(console.width, LEAST_WIDTH)
    return console
