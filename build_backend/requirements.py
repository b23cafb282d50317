"""Prints requirements that pyproject.toml states, one a line, for the Makefile.

usage: requirements.py build            what a build without isolation needs, cmake, ninja and nvcc included
       requirements.py extra NAME...    what the named extras add
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cuda_toolchain

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent


def pyproject() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def main(arguments: list[str]) -> int:
    if arguments == ["build"]:
        # cmake and ninja in any case: the C++ tests run through them, and all machines then build with the same.
        found = [*pyproject()["build-system"]["requires"], "cmake>=3.25", "ninja"]
        found += cuda_toolchain.compiler_requirements(
            os.environ.get("FP4LINEAR_CUDA", "auto"), os.environ.get("FP4LINEAR_CUDA_ARCHITECTURES", "")
        )
    elif len(arguments) > 1 and arguments[0] == "extra":
        extras = pyproject()["project"]["optional-dependencies"]
        found = [requirement for name in arguments[1:] for requirement in extras[name]]
    else:
        print(__doc__, file=sys.stderr)
        return 2
    print("\n".join(dict.fromkeys(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
