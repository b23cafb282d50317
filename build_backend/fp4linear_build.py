"""PEP 517 backend: scikit-build-core, which brings nvcc from PyPI only where this build needs CUDA and has no nvcc."""

from __future__ import annotations

import os
from typing import Any

import cuda_toolchain
from scikit_build_core import build as _inner
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _switch(name: str, default: str, config_settings: dict[str, Any] | None) -> str:
    # The order of scikit-build-core: -C on the command line, then the environment, then the default.
    for prefix in ("", "skbuild."):
        value = (config_settings or {}).get(f"{prefix}cmake.define.{name}")
        if value is not None:
            return str(value)
    return os.environ.get(name, default)


def _compiler_requirements(config_settings: dict[str, Any] | None) -> list[str]:
    return cuda_toolchain.compiler_requirements(
        _switch("FP4LINEAR_CUDA", "auto", config_settings),
        _switch("FP4LINEAR_CUDA_ARCHITECTURES", "", config_settings),
    )


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_inner.get_requires_for_build_wheel(config_settings), *_compiler_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_inner.get_requires_for_build_editable(config_settings), *_compiler_requirements(config_settings)]
