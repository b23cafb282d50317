"""The installed module: what it links and what it shows."""

from __future__ import annotations

from pathlib import Path

from fp4linear import _core
from tests.build import elf

MODULE = Path(_core.__file__)


def test_links_nothing_but_the_system():
    assert elf.needed_libraries(MODULE) <= elf.SYSTEM_LIBRARIES


def test_has_no_search_path():
    assert elf.search_path(MODULE) == []


def test_exports_its_entry_point_only():
    exported = elf.exported_symbols(MODULE)
    # The static CUDA runtime in here would answer for another library's; C++ templates are everybody's.
    assert {name for name in exported if not name.startswith("_Z")} == {"PyInit__core"}
    assert not [name for name in exported if "fp4linear" in name]


def test_is_a_stable_abi_module():
    assert MODULE.name == "_core.abi3.so"
