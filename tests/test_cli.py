"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner, Result

import fp4linear
from fp4linear.bench import timing
from fp4linear.cli import app, main
from fp4linear.files import layers, open_tensors
from fp4linear.files.writers import divisor_of
from tests.checkpoints import (
    Tensor,
    compressed,
    gguf_blocks,
    gguf_bytes,
    modelopt,
    single_file,
    weight_bytes,
    write_file,
)

runner = CliRunner()


def run(*arguments: object) -> Result:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def floats(n: int, k: int, seed: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(dtype)


def float_model(path: Path) -> Path:
    tensors: dict[str, Tensor] = {
        "embed_tokens.weight": ("F32", [16, 32], floats(16, 32, 1).tobytes()),
        "layers.0.up_proj.weight": ("F32", [48, 32], floats(48, 32, 2).tobytes()),
        "layers.0.up_proj.bias": ("F32", [48], floats(1, 48, 3).tobytes()),
        "layers.0.down_proj.weight": ("BF16", [32, 48], floats(32, 48, 4, ml_dtypes.bfloat16).tobytes()),
        "layers.0.norm.weight": ("F16", [32], floats(1, 32, 5, np.float16).tobytes()),
        "layers.0.odd.weight": ("F32", [4, 3], floats(4, 3, 6).tobytes()),
        "lm_head.weight": ("F16", [16, 32], floats(16, 32, 7, np.float16).tobytes()),
        "ids": ("I64", [3], np.arange(3).tobytes()),
    }
    return write_file(path, tensors, {"note": "kept"})


def test_help_names_every_command() -> None:
    out = run("--help").output
    for command in ("demo", "info", "inspect", "quantize", "convert", "bench"):
        assert command in out


def test_help_imports_no_framework() -> None:
    code = (
        "import sys; from fp4linear.cli import app\n"
        "heavy = {'torch', 'jax', 'cupy', 'matplotlib', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_info_json() -> None:
    facts = json.loads(run("info", "--json").output)
    assert facts["version"] == fp4linear.__version__
    assert sum(isa["selected"] for isa in facts["cpu"]["isas"]) == 1
    assert facts["cpu"]["threads"] >= 1
    assert facts["paths"]["cpu, M=1"]["path"] == "cpu_gemv"
    assert {"FP4LINEAR_PATH", "FP4LINEAR_NUM_THREADS"} <= {switch["name"] for switch in facts["environment"]}
    assert facts["libraries"]["numpy"] == np.__version__


def test_info_text() -> None:
    out = run("info").output
    selected = next(isa["name"] for isa in fp4linear._core.isas() if isa["selected"])
    for word in (fp4linear.__version__, selected, "FP4LINEAR_CPU_ISA", "cpu_gemv", "CUDA"):
        assert word in out


def mixed_file(path: Path) -> Path:
    q, k = modelopt("a.q_proj", 8, 64, 1, 0.5), modelopt("a.k_proj", 8, 64, 2, 0.25)
    odd = compressed("fc2", 10, 1168, 3, 3584.0)
    scales = bytearray(odd["fc2.weight_scale"][2])
    scales[:4] = b"\x7f\xff\x00\x80"
    odd["fc2.weight_scale"] = ("F8_E4M3", odd["fc2.weight_scale"][1], bytes(scales))
    awq = modelopt("awq", 8, 64, 4, 0.5) | {"awq.pre_quant_scale": ("F32", [64], np.ones(64, "f4").tobytes())}
    svd = modelopt("svd", 8, 64, 5, 0.5) | {"svd.svdquant_lora_a": ("F32", [1], bytes(4))}
    return write_file(path, q | k | odd | awq | svd)


def test_inspect_json(tmp_path: Path) -> None:
    report = json.loads(run("inspect", mixed_file(tmp_path / "m.safetensors"), "--json").output)
    found = {layer["name"]: layer for layer in report["layers"]}
    assert list(found) == ["a.q_proj", "a.k_proj", "fc2", "awq", "svd"]
    fc2 = found["fc2"]
    assert (fc2["format"], fc2["out_features"], fc2["in_features"]) == ("compressed-tensors", 10, 1168)
    assert (fc2["nan_scales"], fc2["zero_scales"]) == (2, 2)
    assert fc2["scale2_max"] == np.float32(1 / 3584)
    assert fc2["awkward"] == ["K%32=16", "K%128=16", "N%128=10"]
    assert fc2["packed_bytes"] == 10 * 584 + 10 * 73
    assert found["a.q_proj"]["paths"].items() >= {"M=1": "cpu_gemv", "M=64": "cpu_gemm"}.items()
    assert found["awq"]["problem"] is None
    assert "pre_quant_scale multiplies x" in found["awq"]["notes"][0]
    assert "low-rank" in found["svd"]["problem"]
    assert report["mismatched"] == [{"a.q_proj": 0.5, "a.k_proj": 0.25}]


def test_inspect_text(tmp_path: Path) -> None:
    out = run("inspect", mixed_file(tmp_path / "m.safetensors")).output
    for word in (
        "compressed-tensors",
        "modelopt",
        "10 x 1168",
        "K%32=16",
        "global scales differ",
        "can't load",
        "load_awq",
    ):
        assert word in out
    assert "4 NVFP4 layers" in out
    assert "1 that can't be loaded" in out


def test_quantize_writes_layers_and_copies_the_rest(tmp_path: Path) -> None:
    source, target = float_model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    out = run("quantize", source, target).output
    assert "layers.0.up_proj" in out
    assert "2 layers" in out
    assert {layer.name for layer in layers(target)} == {"layers.0.up_proj", "layers.0.down_proj"}
    before, after = open_tensors(source), open_tensors(target)
    for name in ("embed_tokens.weight", "layers.0.up_proj.bias", "layers.0.norm.weight", "layers.0.odd.weight", "ids"):
        assert after.info(name).dtype == before.info(name).dtype
        assert after.array(name).tobytes() == before.array(name).tobytes()
    assert after.metadata("ids")["note"] == "kept"
    config = json.loads(after.metadata("ids")["hf_quant_config"])
    assert config["quantization"]["exclude_modules"] == ["embed_tokens", "lm_head"]
    for name in ("up_proj", "down_proj"):
        weight = before.floats(f"layers.0.{name}.weight")
        got = fp4linear.load(target, f"layers.0.{name}").canonical()
        expected = fp4linear.quantize(weight)
        assert np.array_equal(got[0], expected.b)
        assert np.array_equal(got[1], expected.scales)
        assert got[2] == expected.scale2
    x = np.zeros((1, 32), np.float32)
    assert np.array_equal(
        fp4linear.load(target, "layers.0.up_proj").forward(x)[0], before.floats("layers.0.up_proj.bias")
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--include", "lm_head"], {"lm_head"}),
        (["--include", "*proj"], {"layers.0.up_proj", "layers.0.down_proj"}),
        (["--include", "*", "--exclude", "layers.*"], {"lm_head", "embed_tokens"}),
        (["--exclude", "*down*"], {"layers.0.up_proj"}),
        (["--method", "four_over_six"], {"layers.0.up_proj", "layers.0.down_proj"}),
        (["--method", "mse"], {"layers.0.up_proj", "layers.0.down_proj"}),
    ],
)
def test_quantize_options(tmp_path: Path, options: list[str], expected: set[str]) -> None:
    source, target = float_model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    run("quantize", source, target, *options)
    assert {layer.name for layer in layers(target)} == expected


def test_quantize_reports_the_true_error(tmp_path: Path) -> None:
    source, target = float_model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    reports = {report.name: report for report in fp4linear.files.quantize_file(source, target)}
    weight = floats(48, 32, 2).astype(np.float64)
    difference = fp4linear.load(target, "layers.0.up_proj").dequantize() - weight
    report = reports["layers.0.up_proj"]
    assert report.relative_error == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(weight), rel=1e-12)
    assert report.max_abs_error == pytest.approx(np.abs(difference).max(), rel=1e-12)
    assert (report.bytes_before, report.bytes_after) == (48 * 32 * 4, 48 * 16 + 48 * 2 + 4)


def test_quantize_in_place_with_force(tmp_path: Path) -> None:
    path = float_model(tmp_path / "m.safetensors")
    with pytest.raises(FileExistsError, match="--force"):
        run("quantize", path, path)
    run("quantize", path, path, "--force")
    assert len(layers(path)) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_quantize_twice_finds_nothing_left(tmp_path: Path) -> None:
    source, target = float_model(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    run("quantize", source, target)
    with pytest.raises(ValueError, match="no 2-D float weight"):
        run("quantize", target, tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()


def test_quantize_refuses_what_is_not_finite(tmp_path: Path) -> None:
    weight = floats(4, 32, 1)
    weight[2, 3] = np.nan
    source = write_file(tmp_path / "in.safetensors", {"p.weight": ("F32", [4, 32], weight.tobytes())})
    with pytest.raises(ValueError, match=r"p\.weight"):
        run("quantize", source, tmp_path / "out.safetensors")
    assert list(tmp_path.iterdir()) == [source]


def test_inspect_takes_what_the_tensors_leave_open(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", single_file("p", 128, 64, 1, 0.5))
    assert "can't load" in run("inspect", path).output
    report = json.loads(run("inspect", path, "--format", "comfyui", "--json").output)
    assert (report["layers"][0]["format"], report["layers"][0]["problem"]) == ("comfyui", None)
    report = json.loads(run("inspect", path, "--swizzled", "--json").output)
    assert (report["layers"][0]["format"], report["layers"][0]["problem"]) == ("modelopt", None)


def test_inspect_says_what_gpus_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 20, 64, 1, 0.5))
    here = {"devices": [{"index": i, "name": "H", "sm": 90, "sm_count": 132, "memory": 1} for i in range(2)]}
    monkeypatch.setattr(fp4linear._core, "cuda_info", lambda: here)
    paths = json.loads(run("inspect", path, "--json").output)["layers"][0]["paths"]
    expected = {f"cuda:0, M={m}": fp4linear._core.plan(20, 64, m, device="sm90", sm_count=132).path for m in (1, 64)}
    assert paths == {"M=1": "cpu_gemv", "M=64": "cpu_gemm"} | expected
    assert all(expected.values())
    shown = run("inspect", path).output
    assert "cuda:0" in shown
    assert all(str(name) in shown for name in expected.values())


def test_inspect_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({"p.weight": (40, [2, 64], gguf_blocks(*weight_bytes(2, 64, 1)))}))
    report = json.loads(run("inspect", path, "--json").output)
    (layer,) = report["layers"]
    assert (layer["format"], layer["out_features"], layer["in_features"]) == ("gguf", 2, 64)
    assert "1 NVFP4 layers" in run("inspect", path).output


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors", "comfyui", "torchao"])
def test_convert(tmp_path: Path, target: str) -> None:
    source = write_file(tmp_path / "in.safetensors", modelopt("p", 20, 64, 1, 0.5))
    out = run("convert", source, tmp_path / "out.safetensors", "--to", target).output
    assert f"1 layers as {target}, every bit kept" in " ".join(out.split())
    assert [layer.format for layer in layers(tmp_path / "out.safetensors")] == [target]
    got = fp4linear.load(tmp_path / "out.safetensors", "p").canonical()
    assert np.array_equal(got[0], weight_bytes(20, 64, 1)[0])
    assert np.array_equal(got[1], weight_bytes(20, 64, 1)[1])
    with pytest.raises(FileExistsError, match="--force"):
        run("convert", source, tmp_path / "out.safetensors", "--to", target)


def test_convert_options(tmp_path: Path) -> None:
    source, out = (
        write_file(tmp_path / "in.safetensors", single_file("p", 128, 64, 1, 0.7)),
        tmp_path / "out.safetensors",
    )
    with pytest.raises(ValueError, match="pass format="):
        run("convert", source, out, "--to", "modelopt")
    run("convert", source, out, "--to", "modelopt", "--format", "modelopt-diffusers", "--swizzled", "--nibbles", "high")
    assert np.array_equal(fp4linear.load(out, "p").canonical()[0], weight_bytes(128, 64, 1)[0])
    assert run("convert", source, out, "--to", "nonsense").exit_code != 0
    scale2 = next(s for s in np.linspace(0.6, 0.99, 99, dtype="f4") if not divisor_of("p", s)[1])
    source = write_file(tmp_path / "in2.safetensors", modelopt("p", 4, 32, 1, float(scale2)))
    with pytest.raises(ValueError, match="allow rounding"):
        run("convert", source, out, "--to", "compressed-tensors", "--force")
    shown = run("convert", source, out, "--to", "compressed-tensors", "--force", "--allow-rounding").output
    assert "1 with a rounded global scale" in " ".join(shown.split())


def test_errors_are_one_line_and_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"nonsense")
    monkeypatch.setattr(sys, "argv", ["fp4linear", "inspect", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("fp4linear: error: ")
    assert str(path) in error
    assert error.count("\n") == 1


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times mean nothing in a test."""
    monkeypatch.setattr(timing, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "SETTLE_SECONDS", 0.0)


SMALL = ("bench", "--seconds", "0", "--hot", "--threads", "1")


def test_bench_json_lines(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(*SMALL, "--shape", "96x80", "--shape", "1x34", "--m", "1,3,40", "--dtype", "fp16,fp32", "--json", out)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["n"], r["k"], r["m"], r["dtype"]) for r in records] == [
        (n, k, m, dtype) for n, k in ((96, 80), (1, 34)) for m in (1, 3, 40) for dtype in ("float16", "float32")
    ]
    for r in records:
        codes, scales = np.zeros((r["n"], r["k"] // 2), np.uint8), np.zeros((r["n"], -(-r["k"] // 16)), np.uint8)
        assert r["path"] == fp4linear.Fp4Linear(codes, scales, 1.0).plan(r["m"], r["dtype"]).path
        assert 0 <= r["tolerance_used"] <= 1
        assert r["us"] > 0
        assert r["dense_us"] > 0
        assert (r["weights"], r["weight_sets"], r["threads"], r["bandwidth_share"]) == ("hot", 1, 1, None)
        packed = r["n"] * (r["k"] // 2 + -(-r["k"] // 16))
        assert r["gb_s"] == pytest.approx(packed / r["us"] / 1e3)
        assert r["gflop_s"] == pytest.approx(2 * r["n"] * r["k"] * r["m"] / r["us"] / 1e3)


def test_bench_forces_paths_and_instruction_sets(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ("--shape", "32x64", "--dtype", "fp32", "--json", out)
    run(*SMALL, *options, "--m", "64", "--path", "cpu_gemv", "--isa", "portable")
    record = json.loads(out.read_text())
    assert (record["path"], record["isa"]) == ("cpu_gemv", "portable")
    with pytest.raises(ValueError, match="gemv_scalar"):
        run(*SMALL, *options, "--path", "gemv_scalar")
    with pytest.raises(ValueError, match="nonsense"):
        run(*SMALL, *options, "--isa", "nonsense")


def test_bench_cold_weights_are_distinct_and_compared_with_the_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp4linear.bench import cpu

    monkeypatch.setattr(cpu, "COLD_BYTES", 100_000)
    monkeypatch.setattr(cpu, "BANDWIDTH_BYTES", 1 << 22)
    out = tmp_path / "out.jsonl"
    run("bench", "--device", "cpu", "--seconds", "0", "--shape", "128x128", "--dtype", "bf16", "--json", out)
    record = json.loads(out.read_text())
    assert (record["weights"], record["weight_sets"]) == ("cold", -(-100_000 // (128 * 64 + 128 * 8)))
    assert record["bandwidth_share"] == pytest.approx(record["gb_s"] / record["bandwidth_gb_s"])


def test_bench_fails_where_a_result_is_out_of_tolerance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4linear.bench.cpu import Cpu

    good = Cpu.result

    def wrong(self, prepared):
        x, y, path, isa = good(self, prepared)
        y[-1, -1] = np.nan
        return x, y, path, isa

    monkeypatch.setattr(Cpu, "result", wrong)
    assert run(*SMALL, "--shape", "32x64", "--dtype", "fp32").exit_code == 1


def test_bench_asserts_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4linear.bench.cpu import Cpu

    good = Cpu.result
    monkeypatch.setattr(Cpu, "result", lambda self, prepared: (*good(self, prepared)[:2], "cpu_gemm", "portable"))
    with pytest.raises(RuntimeError, match="cpu_gemm ran, expected cpu_gemv"):
        run(*SMALL, "--shape", "32x64", "--dtype", "fp32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "12"], "expected NxK"),
        (["--shape", "12x13"], "even K"),
        (["--n", "12"], "both or neither"),
        (["--m", "1,x"], "positive integers"),
        (["--m", "0"], "positive integers"),
        (["--dtype", "int8"], "dtype"),
        (["--suite", "nonsense"], "expected default, decode"),
    ],
)
def test_bench_options_that_make_no_sense(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run("bench", *options)


def test_bench_suites() -> None:
    from fp4linear.bench import MODELS, suite

    assert {(item.n, item.k, item.m, item.cold) for item in suite("default")} == {
        (11008, 4096, 1, True),
        (4096, 14336, 1, True),
        *((4096, 4096, m, False) for m in (1, 8, 512)),
    }
    for name in ("decode", "prefill", *MODELS):
        assert all(item.n > 0 and item.k % 2 == 0 for item in suite(name))
    listed = run("bench", "--list-suites").output.split()
    assert listed == ["default", "decode", "prefill", "qwen-step", *MODELS]


def test_bench_does_without_bf16_where_ml_dtypes_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4linear.cli.bench.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    out = run(*SMALL, "--shape", "32x64").output
    assert "pip install ml_dtypes" in out
    assert "fp32" in out
    with pytest.raises(ValueError, match="needs ml_dtypes"):
        run(*SMALL, "--shape", "32x64", "--dtype", "bf16")


def test_bench_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    run(*SMALL, "--shape", "32x64", "--m", "1,2", "--dtype", "fp32", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_accuracy_measure_sees_errors() -> None:
    from fp4linear.bench import measure

    random = np.random.default_rng(1)
    b, scales = random.integers(0, 256, (70, 24), dtype=np.uint8), random.integers(0x20, 0x59, (70, 3), dtype=np.uint8)
    x = random.standard_normal((20, 48)).astype(np.float32)
    bias = random.standard_normal(70).astype(np.float32)
    exact = fp4linear.reference(x, b, scales, 0.5, bias)
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        assert measure(x, exact.astype(dtype), b, scales, 0.5, bias).good
    for wrong in (exact * 1.001, np.where(np.arange(70) == 69, np.nan, exact), -exact):
        assert not measure(x, wrong.astype(np.float32), b, scales, 0.5, bias).good
        assert not measure(x, wrong.astype(np.float32), b, scales, 0.5, bias, sample=True).good
    assert measure(x, exact.astype(np.float32), b, scales, np.full(70, 0.5, np.float32), bias).good
    assert not measure(x, exact.astype(np.float32), b, scales, 0.5).good
