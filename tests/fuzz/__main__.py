"""Runs fuzz targets of the loaders.

    python -m tests.fuzz [--seconds S | --runs N] [--seed N] [--corpus DIR] [TARGET ...]
    python -m tests.fuzz --reproduce FILE TARGET

With atheris (pip install atheris) the package is instrumented and inputs follow coverage; without it they are random.
Each target runs in a process of its own. An input that fails is kept in the corpus directory and its traceback shown.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANDOM_LENGTH = 400  # bytes of an input at most: decisions, or a small file


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help="all of them without a name")
    parser.add_argument("--seconds", type=float, help="for each target")
    parser.add_argument("--runs", type=int, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz/python"))
    parser.add_argument("--reproduce", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.child and options.reproduce is None:
        return parent(options)
    (name,) = options.targets
    if options.reproduce is not None:
        from tests.fuzz.targets import TARGETS

        TARGETS[name](options.reproduce.read_bytes())
        return 0
    corpus = options.corpus / name
    corpus.mkdir(parents=True, exist_ok=True)
    run = with_atheris if importlib.util.find_spec("atheris") else without
    return run(name, corpus, options)


def parent(options: argparse.Namespace) -> int:
    """Every target in its own process, one after another; the exit code says whether all were clean."""
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in options.targets or TARGETS:
        if name not in TARGETS:
            raise SystemExit(f"{name}: no such target; there are {', '.join(TARGETS)}")
        limits = [
            f"--{key}={value}"
            for key in ("seconds", "runs", "seed", "corpus")
            if (value := getattr(options, key)) is not None
        ]
        if subprocess.run([sys.executable, "-m", "tests.fuzz", "--child", *limits, name], check=False).returncode:
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all clean")
    return 1 if failed else 0


def with_atheris(name: str, corpus: Path, options: argparse.Namespace) -> int:
    import atheris

    with atheris.instrument_imports(include=["fp4linear"]):
        from tests.fuzz.targets import TARGETS

    arguments = [sys.argv[0], str(corpus), f"-seed={options.seed}", f"-artifact_prefix={corpus}/", "-max_len=2048"]
    arguments += ["-rss_limit_mb=2500", "-timeout=60", "-print_final_stats=1", "-verbosity=0"]
    if options.seconds is not None:
        arguments.append(f"-max_total_time={max(1, round(options.seconds))}")
    if options.runs is not None:
        arguments.append(f"-runs={options.runs}")
    print(f"{name}:", flush=True)
    atheris.Setup(arguments, TARGETS[name])
    atheris.Fuzz()  # leaves the process
    return 0


def without(name: str, corpus: Path, options: argparse.Namespace) -> int:
    from tests.fuzz.targets import TARGETS

    generator, count, end = random.Random(options.seed), 0, None
    if options.seconds is not None:
        end = time.monotonic() + options.seconds
    while (options.runs is None or count < options.runs) and (end is None or time.monotonic() < end):
        data = generator.randbytes(generator.randrange(RANDOM_LENGTH))
        attempt(TARGETS[name], data, corpus)
        count += 1
    print(f"{name}: {count} inputs", flush=True)
    return 0


def attempt(target: Callable[[bytes], None], data: bytes, corpus: Path) -> None:
    try:
        target(data)
    except BaseException:
        path = corpus / "crash"
        path.write_bytes(data)
        print(f"the input is in {path}", file=sys.stderr)
        raise


if __name__ == "__main__":
    sys.exit(main())
