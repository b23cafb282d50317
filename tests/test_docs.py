"""What the documents say against what the library is."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import fp4linear
from fp4linear import _quantize, _reference

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("module", [_quantize, _reference], ids=lambda module: str(module.__name__))
def test_examples_of_the_docstrings(module: object) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_readme_lists_every_switch() -> None:
    switches = {entry["name"] for entry in fp4linear._core.environment()}
    assert switches <= set(re.findall(r"`(FP4LINEAR_\w+)`", README))


def test_the_readme_names_every_path() -> None:
    plan = fp4linear._core.plan(64, 128, 1, path="dequant_cublas", kernels=[])
    assert set(plan.reasons) <= set(re.findall(r"`(\w+)`", README))


def test_links_of_the_documents() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
