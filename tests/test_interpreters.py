"""Several interpreters in one process: one has the library, the others are refused in words."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest

from fp4linear import _core
from tests.child import run_child

START = """
    import sys
    try:
        import _interpreters
    except ImportError:  # before Python 3.13
        import _xxsubinterpreters as _interpreters

    def run(interpreter, code):
        code = f"import sys; sys.path[:0] = {sys.path!r}\\n" + code
        if sys.version_info >= (3, 13):
            failed = _interpreters.exec(interpreter, code)
            if failed is not None: raise RuntimeError(failed.formatted)
        else:
            _interpreters.run_string(interpreter, code)

    def create(own_gil):
        if sys.version_info >= (3, 13):
            return _interpreters.create("isolated" if own_gil else "legacy")
        return _interpreters.create(isolated=own_gil)
"""

IMPORT = """
    import importlib.util
    spec = importlib.util.spec_from_file_location("fp4linear._core", PATH)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        print(error, flush=True)
    else:
        print("imported", module.default_threads() > 0, flush=True)
"""

AFTER = """
    import numpy as np
    import fp4linear
    from tests import reference

    layer = fp4linear.Fp4Linear(*reference.make(64, 128, 1), 0.5, threads=3)
    x = reference.x_of(20, 128, 2)
    wanted = layer.forward(x)
    for turn in range(3):
        other = create(OWN_GIL)
        run(other, IMPORT)
        _interpreters.destroy(other)
        assert (layer.forward(x) == wanted).all()
        assert (fp4linear.Fp4Linear(*reference.make(64, 128, 1), 0.5).forward(x) == wanted).all()
    print("done")
"""


def child(code: str, *, own_gil: bool) -> str:
    # The compiled half alone: NumPy's own refusal would come first.
    inner = dedent(IMPORT).replace("PATH", repr(_core.__file__))
    text = dedent(START) + f"IMPORT = {inner!r}\n" + dedent(code).replace("OWN_GIL", str(own_gil))
    return run_child(text).stdout


def test_a_second_interpreter_is_refused() -> None:
    refusal = "fp4linear works in one interpreter of a process, and another one has imported it\n"
    assert child(AFTER, own_gil=False) == 3 * refusal + "done\n"


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Python 3.12 and later have interpreters with a GIL of their own"
)
def test_an_interpreter_with_its_own_gil_is_refused() -> None:
    refusal = "module fp4linear._core does not support loading in subinterpreters\n"
    assert child(AFTER, own_gil=True) == 3 * refusal + "done\n"


def test_the_first_interpreter_has_it_even_when_it_is_gone() -> None:
    """What the module keeps of it is gone too."""
    code = """
    other = create(False)
    run(other, IMPORT)
    run(other, IMPORT)
    _interpreters.destroy(other)
    try:
        import fp4linear
    except ImportError as error:
        print(error)
    """
    lines = child(code, own_gil=False).splitlines()
    assert lines[:2] == ["imported True"] * 2
    assert lines[2].startswith("fp4linear works in one interpreter")
