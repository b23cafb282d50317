"""`fp4linear info`: what this build and this machine can run."""

from __future__ import annotations

import json
import platform
from typing import Annotated, Any

import typer

from .console import make_console

LIBRARIES = (
    "numpy",
    "ml_dtypes",
    "torch",
    "jax",
    "cupy",
    "safetensors",
    "tokenizers",
    "matplotlib",
    "nanobind-backend",
)
PROBED_M = (1, 64)  # decode and prefill


def command(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Version, instruction sets, CUDA build and devices, paths with reasons, environment switches, libraries."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)


def collect() -> dict[str, Any]:
    """Everything `info` knows, ready for JSON."""
    import numpy as np

    import fp4linear
    from fp4linear import _core

    cuda = _core.cuda_info()
    paths: dict[str, dict[str, Any]] = {}
    for device in ("cpu", *(f"cuda:{device['index']}" for device in cuda["devices"])):
        try:
            probe = fp4linear.Fp4Linear(np.zeros((128, 64), np.uint8), np.zeros((128, 8), np.uint8), 1.0, device=device)
        except (RuntimeError, ValueError) as error:  # a GPU that is there and can't be used is worth knowing
            paths[device] = {"path": None, "reasons": {}, "error": str(error)}
            continue
        for m in PROBED_M:
            plan = probe.plan(m)
            paths[f"{device}, M={m}"] = {"path": plan.path, "reasons": dict(plan.reasons)}
    return {
        "version": fp4linear.__version__,
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "cpu": cpu_name()},
        "cpu": {"isas": _core.isas(), "threads": _core.default_threads()},
        "cuda": cuda,
        "paths": paths,
        "environment": _core.environment(),
        "libraries": {name: version_of(name) for name in LIBRARIES},
    }


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def version_of(distribution: str) -> str | None:
    """The installed version, without importing the library."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def show(facts: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    console = make_console()
    console.print(f"[bold]fp4linear {facts['version']}[/], Python {facts['python']}, {facts['machine']['cpu']}")

    cpu = Table("instruction set", "runs here", "selected", title="CPU", title_justify="left", box=box.SIMPLE_HEAD)
    for isa in facts["cpu"]["isas"]:
        cpu.add_row(isa["name"], "yes" if isa["runs_here"] else "no", "yes" if isa["selected"] else "")
    console.print(cpu)
    console.print(f"threads of a call: {facts['cpu']['threads']}")

    cuda = facts["cuda"]
    console.print(f"\n[bold]CUDA[/] {cuda.get('build_info') or ('built' if cuda['built'] else 'not built')}")
    for device in cuda["devices"]:
        console.print(f"  cuda:{device['index']} {device['name']}, SM{device['sm']}, {device['sm_count']} SMs")
    if not cuda["devices"] and cuda["reason"] != cuda.get("build_info"):
        console.print(f"  no device: {cuda['reason']}")

    for where, plan in facts["paths"].items():
        table = Table("path", "", title=f"Paths on {where}", title_justify="left", box=box.SIMPLE_HEAD)
        for path, reason in plan["reasons"].items():
            table.add_row(path, reason)
        if "error" in plan:
            table.add_row("none", plan["error"])
        else:
            table.add_row(f"[bold]{plan['path']}[/]", "runs")
        console.print(table)

    switches = Table(
        "variable", "value", "takes", "meaning", title="Environment", title_justify="left", box=box.SIMPLE_HEAD
    )
    for switch in facts["environment"]:
        switches.add_row(switch["name"], switch["value"], switch["takes"], switch["meaning"])
    console.print(switches)
    found = [f"{name} {version}" for name, version in facts["libraries"].items() if version]
    absent = [name for name, version in facts["libraries"].items() if not version]
    console.print("[bold]Libraries[/] " + ", ".join(found) + (f"; absent: {', '.join(absent)}" if absent else ""))
