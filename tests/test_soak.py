"""tools/soak.py, bounded: mixed calls over threads, errors in between, bits of the serial calls."""

from __future__ import annotations

import pytest

from tests.child import ROOT, run_child


def soak(*arguments: str, **environment: str) -> str:
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tools")!r})
        import soak
        raise SystemExit(soak.main(sys.argv[1:]))
    """
    return run_child(code, arguments=arguments, timeout=600, **environment).stdout


@pytest.mark.slow
def test_soak() -> None:
    assert "no wrong bit" in soak("--calls", "6000", "--layers", "30")


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.slow
def test_soak_on_a_gpu() -> None:
    assert "no wrong bit" in soak("--device", "cuda", "--calls", "6000", "--layers", "30")


def test_a_wrong_bit_is_seen() -> None:
    """The oracle can fail: a result whose serial one was something else."""
    code = f"""
        import random, sys
        sys.path.insert(0, {str(ROOT / "tools")!r})
        import soak
        backend = soak.Cpu()
        case = soak.make_case(backend, random.Random(3))
        case.wanted = [b"x" + raw for raw in case.wanted]
        try: soak.run(backend, [case], 100, 2, 1)
        except AssertionError as error: print("seen" if "other bits" in str(error) else error)
    """
    assert run_child(code).stdout == "seen\n"
