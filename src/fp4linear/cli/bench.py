"""`fp4linear bench`: accuracy and latency, beside a dense matmul and the read bandwidth of the same run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import make_console

if TYPE_CHECKING:
    from fp4linear.bench import Item, Record


def command(
    suite: Annotated[
        str, typer.Option(help="default, decode, prefill, or a model (--list-suites prints them).")
    ] = "default",
    shape: Annotated[list[str] | None, typer.Option(help="NxK instead of a suite; repeatable.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="out_features, with --k.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="in_features, with --n.")] = None,
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, such as 1,8,64.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, or several with commas.")] = None,
    hot: Annotated[bool, typer.Option("--hot", help="One layer again and again instead of >= 500 MB of them.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a call, ours and the dense one's.")] = None,
    path: Annotated[str, typer.Option(help="Force a path; it is an error if it can't run.")] = "auto",
    isa: Annotated[str | None, typer.Option(help="Force an instruction set (see fp4linear info).")] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for each line of the table.")] = 2.0,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Time NumPy's float32 matmul beside.")] = True,
    json_file: Annotated[str | None, typer.Option("--json", help="JSON lines to this file, - for stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of latency and bandwidth over M (PNG).")] = None,
    list_suites: Annotated[bool, typer.Option("--list-suites", help="Print the suites and stop.")] = False,
) -> None:
    """Time NVFP4 layers on the CPU: medians of samples that alternate with a dense matmul.

    Every line asserts the path that ran and compares the result with fp64. Weights rotate over >= 500 MB (cold) unless
    --hot; the default suite has both. Exit status 1 where a result is out of tolerance.
    """
    from fp4linear import bench
    from fp4linear.bench import report, suites
    from fp4linear.bench.cpu import Cpu

    if list_suites:
        print("\n".join(("default", "decode", "prefill", *bench.MODELS)))
        return
    items = choose(suite, shape, n, k, m, dtype)
    items = [
        replace(item, cold=item.cold and not hot, threads=threads or item.threads, path=path, isa=isa) for item in items
    ]
    # Tables go to stderr where stdout carries JSON.
    console = make_console(stderr=json_file == "-")
    if dtype is None and find_spec("ml_dtypes") is None:
        items = [item for item in items if item.dtype != "bfloat16"] or suites.vary(items, dtypes=["float32"])
        console.print("no bf16, for want of ml_dtypes: pip install ml_dtypes")
    records: list[Record] = []
    with console.status("") as status:
        source = bench.run(Cpu(dense=dense), items, seconds=seconds)
        for item in items:
            status.update(f"{len(records) + 1}/{len(items)}: {item.n}x{item.k} M={item.m} {item.dtype}")
            records.append(next(source))
    console.print(report.table(records))
    summarise(records, console.print)
    if json_file == "-":
        report.write_json_lines(records, sys.stdout)
    elif json_file is not None:
        with open(json_file, "w") as file:
            report.write_json_lines(records, file)
    if plot is not None:
        report.plot(records, plot)
    sys.exit(0 if all(record.good for record in records) else 1)


def choose(
    suite: str, shapes: list[str] | None, n: int | None, k: int | None, m: str | None, dtype: str | None
) -> list[Item]:
    """The items that the options name. ValueError for options that say nothing or too much."""
    from fp4linear.bench import suites

    if (n is None) != (k is None):
        raise ValueError("--n and --k: expected both or neither")
    pairs = [suites.parse_shape(text) for text in shapes or ()]
    if n is not None and k is not None:
        pairs.append(suites.parse_shape(f"{n}x{k}"))
    items = [suites.Item(*pair, m=1) for pair in pairs] if pairs else suites.suite(suite)
    rows = suites.parse_numbers(m, "--m") if m is not None else None
    return suites.vary(items, m=rows, dtypes=suites.parse_dtypes(dtype) if dtype is not None else None)


def summarise(records: list[Record], say: Callable[[str], None]) -> None:
    """The conditions under which the table holds."""
    for threads in sorted({r.threads or 0 for r in records}):
        rates = [r.bandwidth_gb_s for r in records if r.bandwidth_gb_s and r.threads == threads]
        if rates:
            say(f"read bandwidth in this run, {threads} threads: {min(rates):.1f} to {max(rates):.1f} GB/s")
    for dense in sorted({r.dense for r in records if r.dense}):
        say(f"dense: {dense}")
    say(
        f"fp4linear {records[0].version}, {', '.join(sorted({r.isa for r in records}))}, {records[0].date}. Medians; "
        "us and GB/s of packed weights a call;\ngain: dense / ours; tol.: error against fp64 over the contract's."
    )
