"""The ladder from Python: for devices that need not be here, and for a layer that is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4linear
from fp4linear import _core
from tests import reference
from tests.backends import CPU_PATHS, ISAS

LADDER = [
    "cpu_gemv", "cpu_gemm", "gemv_tensor_core", "gemv_scalar", "native_nvfp4", "native_emulated", "gemm_fused",
    "dequant_cublas",
]  # fmt: skip
GPUS = ["sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"]


def plan(m: int, device: str, n: int = 4096, k: int = 4096, **options: Any) -> fp4linear.Plan:
    return _core.plan(n, k, m, device=device, **options)


@pytest.mark.parametrize(("device", "m", "options", "path"), [
    # The host: by M alone.
    ("cpu", 1, {}, "cpu_gemv"),
    ("cpu", 16, {"cpu_gemv_max_m": 16}, "cpu_gemv"),
    ("cpu", 17, {"cpu_gemv_max_m": 16}, "cpu_gemm"),
    ("cpu", 5, {"gemv_max_m": 4}, "cpu_gemm"),
    ("cpu", 1, {"gemv_max_m": 0}, "cpu_gemm"),
    ("cpu", 3, {"n": 7, "k": 2, "block_size": 5, "dtype": "float32"}, "cpu_gemv"),
    # Small M.
    ("sm75", 1, {}, "gemv_scalar"),
    ("sm80", 1, {}, "gemv_tensor_core"),
    ("sm89", 8, {}, "gemv_tensor_core"),
    ("sm90", 1, {"k": 4096 + 32}, "gemv_scalar"),
    ("sm90", 1, {"gemv_tensor_core": False}, "gemv_scalar"),
    ("sm120", 8, {"native": True}, "gemv_tensor_core"),
    # Large M.
    ("sm75", 64, {}, "dequant_cublas"),
    ("sm80", 64, {}, "gemm_fused"),
    ("sm90", 9, {}, "gemm_fused"),
    ("sm90", 4096, {}, "gemm_fused"),
    ("sm90", 1 << 20, {}, "gemm_fused"),
    ("sm80", 1025, {}, "dequant_cublas"),
    ("sm80", 1025, {"cublaslt": False}, "gemm_fused"),
    ("sm100", 64, {}, "gemm_fused"),
    ("sm120", 64, {}, "gemm_fused"),
    ("sm120", 64, {"native": True}, "native_nvfp4"),
    ("sm100", 9, {"native": True}, "native_nvfp4"),
    ("sm90", 64, {"native": True}, "gemm_fused"),
    ("sm120", 64, {"native": True, "n": 4096 + 16}, "gemm_fused"),
    # Everything else.
    ("sm90", 1, {"k": 48}, "dequant_cublas"),
    ("sm90", 64, {"block_size": 32}, "dequant_cublas"),
    ("sm90", 64, {"k": 4304}, "dequant_cublas"),
])  # fmt: skip
def test_the_path_that_the_ladder_takes(device: str, m: int, options: dict[str, Any], path: str) -> None:
    assert plan(m, device, **options).path == path


@pytest.mark.parametrize(("path", "device", "m", "options", "reason"), [
    ("cpu_gemv", "cpu", 17, {"cpu_gemv_max_m": 16}, "M = 17"),
    ("cpu_gemv", "sm90", 1, {}, "GPU"),
    ("cpu_gemm", "sm90", 1, {}, "GPU"),
    ("gemv_tensor_core", "sm75", 1, {}, "SM80"),
    ("gemv_tensor_core", "sm90", 9, {}, "M = 9"),
    ("gemv_tensor_core", "sm90", 1, {"k": 4128}, "K = 4128"),
    ("gemv_tensor_core", "sm90", 1, {"block_size": 32}, "block_size"),
    ("gemv_tensor_core", "sm90", 1, {"gemv_tensor_core": False}, "FP4LINEAR_GEMV_TENSOR_CORE"),
    ("gemv_scalar", "sm75", 9, {}, "M = 9"),
    ("gemv_scalar", "sm75", 1, {"k": 4112}, "K = 4112"),
    ("gemv_scalar", "sm75", 1, {"block_size": 8}, "block_size"),
    ("native_nvfp4", "sm120", 64, {}, "FP4LINEAR_NATIVE_NVFP4"),
    ("native_nvfp4", "sm90", 64, {"native": True}, "SM90"),
    ("native_nvfp4", "sm120", 8, {"native": True, "gemv_tensor_core": False, "k": 48}, "K = 48"),
    ("native_nvfp4", "sm120", 64, {"native": True, "n": 40}, "N = 40"),
    ("native_emulated", "sm90", 64, {}, "native_emulated"),
    ("gemm_fused", "sm75", 64, {}, "SM80"),
    ("gemm_fused", "sm90", 64, {"k": 4304}, "K = 4304"),
    ("gemm_fused", "sm90", 64, {"block_size": 4}, "block_size"),
])  # fmt: skip
def test_the_reason_why_a_rung_is_passed_over(
    path: str, device: str, m: int, options: dict[str, Any], reason: str
) -> None:
    answer = plan(m, device, **options)
    assert answer.path != path
    assert reason in answer.reasons[path]
    assert f"not {path}: {answer.reasons[path]}" in str(answer) == answer.details


def test_no_library_for_the_last_rung() -> None:
    answer = plan(64, "sm75", cublaslt=False)
    assert answer.path is None
    assert "cuBLASLt" in answer.reasons["dequant_cublas"]
    assert list(answer.reasons) == LADDER
    assert plan(1, "sm75", cublaslt=False).path == "gemv_scalar"


@pytest.mark.parametrize("device", GPUS)
def test_a_build_without_a_kernel_says_so(device: str) -> None:
    for path in LADDER[2:]:
        without = [name for name in LADDER if name != path]
        for m in (1, 64):
            answer = plan(m, device, native=True, kernels=without)
            assert answer.path != path
            forced = plan(m, device, native=True, kernels=without, path=path)
            of_another_gpu = path == "native_nvfp4" and device not in ("sm100", "sm103", "sm120", "sm121")
            assert forced.path is None
            assert ("needs SM10x or SM12x" if of_another_gpu else "kernel") in forced.reasons[path]


@pytest.mark.parametrize("device", ["cpu", *GPUS])
@pytest.mark.parametrize(("n", "k", "m"), [(0, 64, 1), (64, 0, 1), (64, 64, 0), (0, 0, 0)])
def test_nothing_to_compute(device: str, n: int, k: int, m: int) -> None:
    answer = _core.plan(n, k, m, device=device)
    assert answer.path == "none" and answer.reasons == {} and "nothing to compute" in str(answer)


@pytest.mark.parametrize("sm_count", [1, 2, 40, 132, 188])
def test_rows_that_share_a_weight_load(sm_count: int) -> None:
    """1 if M <= 1 or ceil(N/8) < SM count, else 4 if M >= 4, else 2 (the operator's rule)."""
    for m, n in itertools.product(
        [1, 2, 3, 4, 8], [1, 8 * sm_count - 8, 8 * sm_count - 7, 8 * sm_count, 32 * sm_count]
    ):
        if n == 0:
            continue
        want = 1 if m <= 1 or -(-n // 8) < sm_count else 4 if m >= 4 else 2
        assert plan(m, "sm75", n=n, sm_count=sm_count).rows_per_block == want
        assert plan(m, "sm75", n=n, sm_count=sm_count, gemv_row_tiling=False).rows_per_block == 1


@pytest.mark.parametrize("device", ["sm80", "sm90", "sm100", "sm120"])
def test_batch_invariant_takes_one_path_for_every_m(device: str) -> None:
    for options in ({}, {"native": True}):
        paths = {plan(m, device, batch_invariant=True, **options).path for m in (1, 2, 8, 9, 64, 4096)}
        assert paths == {"gemm_fused"}
        scalar = {plan(m, device, k=4096 + 32, batch_invariant=True, **options).path for m in (1, 8, 9, 4096)}
        assert scalar == {"gemv_scalar"}
    assert len({plan(m, "cpu", batch_invariant=True).path for m in (1, 9, 64, 4096)}) == 1


@given(
    m=st.integers(0, 5000), n=st.integers(0, 9000), k=st.integers(0, 3000).map(lambda half: 2 * half),
    block_size=st.sampled_from([1, 16, 16, 16, 32]), dtype=st.sampled_from(["float16", "bfloat16"]),
    device=st.sampled_from(["cpu", *GPUS]), sm_count=st.integers(1, 300), native=st.booleans(),
    tensor_core=st.booleans(), path=st.sampled_from(["auto", "auto", *LADDER]),
)  # fmt: skip
def test_every_question_has_an_answer(
    m: int, n: int, k: int, block_size: int, dtype: str, device: str, sm_count: int, native: bool, tensor_core: bool,
    path: str,
) -> None:  # fmt: skip
    answer = _core.plan(
        n, k, m, dtype=dtype, block_size=block_size, device=device, sm_count=sm_count, native=native,
        gemv_tensor_core=tensor_core, path=path,
    )  # fmt: skip
    if 0 in (m, n, k):
        assert answer.path == "none"
        return
    reasons = list(answer.reasons)
    if path == "auto":  # every shape runs on every device, and just the rungs above are explained
        assert reasons == LADDER[: LADDER.index(answer.path)]
        assert (answer.path in CPU_PATHS) == (device == "cpu")
        assert answer.path != "native_emulated"
        if answer.path == "native_nvfp4":
            assert native and m > 8
    else:
        assert answer.path in (path, None)
        assert reasons == (LADDER if answer.path is None else LADDER[: LADDER.index(path)])
    assert all(answer.reasons.values())


@pytest.mark.parametrize("bad", [
    {"device": "gpu"}, {"device": "sm"}, {"device": "sm9x"}, {"path": "gemv"}, {"path": ""}, {"dtype": "float64"},
    {"block_size": 0}, {"n": -1}, {"kernels": ["gemm"]}, {"m": -1},
])  # fmt: skip
def test_bad_questions(bad: dict[str, Any]) -> None:
    question: dict[str, Any] = {"n": 8, "k": 32, "m": 1} | bad
    with pytest.raises(ValueError):
        _core.plan(question.pop("n"), question.pop("k"), question.pop("m"), **question)


# A layer's own plan


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_layer_does_what_it_planned(isa: str, dtype: str) -> None:
    from tests.strategies import DTYPES

    layer = fp4linear.Fp4Linear(*reference.make(40, 96, 0), 1.0, isa=isa)
    for m in (1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 200):
        layer.forward(np.ones((m, 96), DTYPES[dtype]))
        assert layer.plan(m, dtype=dtype).path == layer.last_path in CPU_PATHS
    assert layer.plan(1, dtype=dtype).path == "cpu_gemv"
    assert layer.plan(100_000, dtype=dtype).path == "cpu_gemm"
    assert layer.plan(0).path == "none"


@pytest.mark.parametrize("path", CPU_PATHS)
def test_a_forced_path_runs_for_every_m(path: str) -> None:
    layer = fp4linear.Fp4Linear(*reference.make(40, 96, 0), 1.0, path=path)
    for m in (1, 100):
        assert layer.plan(m).path == path
        layer.forward(np.ones((m, 96), np.float16))
        assert layer.last_path == path


@pytest.mark.parametrize("path", [path for path in LADDER[2:] if path != "native_emulated"])
def test_a_gpu_path_on_the_host_names_the_unmet_condition(path: str) -> None:
    b, scales = reference.make(40, 96, 0)
    x = np.ones((3, 96), np.float16)
    with pytest.raises(ValueError, match=rf"path='{path}'"):
        fp4linear.Fp4Linear(b, scales, 1.0, path=path).forward(x)
    # M = 0 computes nothing, so nothing is forced; a name that is none is an error always.
    with pytest.raises(ValueError, match="path='cpu'"):
        fp4linear.Fp4Linear(b, scales, 1.0, path="cpu")


def test_batch_invariant_refuses_the_path_that_is_not() -> None:
    b, scales = reference.make(40, 96, 0)
    with pytest.raises(ValueError, match="batch_invariant"):
        fp4linear.Fp4Linear(b, scales, 1.0, path="cpu_gemm", batch_invariant=True).forward(np.ones((3, 96), np.float16))
