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
    from rich.console import Console

    from fp4linear.bench import Item, Record
    from fp4linear.bench.device import Device

CPU_SECONDS, GPU_SECONDS = 2.0, 0.3  # a line


def command(
    suite: Annotated[
        str, typer.Option(help="default, decode, prefill, qwen-step or a model (--list-suites prints them).")
    ] = "default",
    shape: Annotated[list[str] | None, typer.Option(help="NxK instead of a suite; repeatable.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="out_features, with --k.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="in_features, with --n.")] = None,
    m: Annotated[str | None, typer.Option("--m", help="Rows of x, such as 1,8,64.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; by default a GPU where torch can use it.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16, fp32, or several with commas.")] = None,
    hot: Annotated[bool, typer.Option("--hot", help="One layer again and again instead of many.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU: threads of a call, ours and dense.")] = None,
    path: Annotated[str, typer.Option(help="Force a path; it is an error if it can't run.")] = "auto",
    isa: Annotated[str | None, typer.Option(help="CPU: force an instruction set (see info).")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Time for each line of the table: 2 on the CPU, 0.3 on a GPU.")
    ] = None,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Time a dense matmul beside.")] = True,
    json_file: Annotated[str | None, typer.Option("--json", help="JSON lines to this file, - for stdout.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A picture of latency and bandwidth over M (PNG).")] = None,
    list_suites: Annotated[bool, typer.Option("--list-suites", help="Print the suites and stop.")] = False,
) -> None:
    """Time NVFP4 layers: medians of samples that alternate with a dense matmul.

    Every line asserts the path that ran and compares the result with fp64. Weights rotate over more memory than the
    caches hold (cold) unless --hot. On a GPU calls are replayed as CUDA graphs beside torch's matmul, which needs
    fp4linear[torch]. Exit status 1 where a result is out of tolerance.
    """
    from fp4linear import bench
    from fp4linear.bench import suites
    from fp4linear.bench.choice import choose_device

    if list_suites:
        print("\n".join(suites.NAMES))
        return
    # Tables go to stderr where stdout carries JSON.
    console = make_console(stderr=json_file == "-")
    choice = choose_device(device, cpu_option=cpu_option(threads, isa, path))
    console.print(f"device {choice.name}: {choice.why}", highlight=False)
    items = choose(suite, shape, n, k, m, dtype, choice.name)
    items = [
        replace(item, cold=item.cold and not hot, threads=threads or item.threads, path=path, isa=isa) for item in items
    ]
    if choice.index is None and dtype is None and find_spec("ml_dtypes") is None:
        items = [item for item in items if item.dtype != "bfloat16"] or suites.vary(items, dtypes=["float32"])
        console.print("no bf16, for want of ml_dtypes: pip install ml_dtypes")
    records: list[Record] = []
    if seconds is None:
        seconds = CPU_SECONDS if choice.index is None else GPU_SECONDS
    source = bench.run(make_device(choice.index, dense), items, seconds=seconds)
    try:
        with console.status("") as status:
            for item in items:
                status.update(f"{len(records) + 1}/{len(items)}: {item}")
                records.append(next(source))
    finally:  # what was measured before an error is shown and written
        if records:
            present(records, console, json_file, plot)
    sys.exit(0 if all(record.good for record in records) else 1)


def cpu_option(threads: int | None, isa: str | None, path: str) -> str | None:
    """An option that only the CPU has."""
    given = {"--threads": threads is not None, "--isa": isa is not None, f"--path {path}": path.startswith("cpu_")}
    return next((option for option, there in given.items() if there), None)


def make_device(index: int | None, dense: bool) -> Device:
    """The GPU with this index, or the CPU."""
    if index is None:
        from fp4linear.bench.cpu import Cpu

        return Cpu(dense=dense)
    from fp4linear.bench.gpu import Gpu

    return Gpu(index, dense=dense)


def choose(
    suite: str,
    shapes: list[str] | None,
    n: int | None,
    k: int | None,
    m: str | None,
    dtype: str | None,
    device: str = "cpu",
) -> list[Item]:
    """The items that the options name. ValueError for options that say nothing or too much."""
    from fp4linear.bench import suites

    if (n is None) != (k is None):
        raise ValueError("--n and --k: expected both or neither")
    pairs = [suites.parse_shape(text) for text in shapes or ()]
    if n is not None and k is not None:
        pairs.append(suites.parse_shape(f"{n}x{k}"))
    items = [suites.Item(*pair, m=1) for pair in pairs] if pairs else suites.suite(suite, device)
    rows = suites.parse_numbers(m, "--m") if m is not None else None
    return suites.vary(items, m=rows, dtypes=suites.parse_dtypes(dtype) if dtype is not None else None)


def present(records: list[Record], console: Console, json_file: str | None, plot: Path | None) -> None:
    """The table, and the files that were asked for."""
    from fp4linear.bench import report

    console.print(report.table(records))
    summarise(records, console.print)
    if json_file == "-":
        report.write_json_lines(records, sys.stdout)
    elif json_file is not None:
        with open(json_file, "w") as file:
            report.write_json_lines(records, file)
    if plot is not None:
        report.plot(records, plot)


def summarise(records: list[Record], say: Callable[[str], None]) -> None:
    """The conditions under which the table holds."""
    for threads in sorted({r.threads or 0 for r in records}):
        rates = [r.bandwidth_gb_s for r in records if r.bandwidth_gb_s and (r.threads or 0) == threads]
        if rates:
            by = f"{threads} threads" if threads else ", ".join(sorted({r.bandwidth_by for r in records}))
            say(f"read bandwidth in this run, {by}: {min(rates):.1f} to {max(rates):.1f} GB/s")
    for limit in sorted({r.limit_gb_s for r in records if r.limit_gb_s}):
        say(f"limit recorded for this GPU: {limit:.0f} GB/s")
    for dense in sorted({r.dense for r in records if r.dense}):
        say(f"dense: {dense}")
    say(
        f"fp4linear {records[0].version}, {records[0].device_model}, {', '.join(sorted({r.isa for r in records}))}, "
        f"{records[0].date}. Medians;\nus and bytes of packed weights a call; gain: dense / ours; "
        "tol.: error against fp64 over the contract's."
    )
