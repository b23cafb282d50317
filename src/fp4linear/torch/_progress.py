"""A progress bar over layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def each(items: Sequence[T], doing: str, show: bool) -> Iterator[T]:
    """The items one by one, with a bar on stderr while they last."""
    if not show:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, doing, console=Console(stderr=True), transient=True)
