"""The benchmark on a GPU. What needs none runs everywhere: suites, the choice of the device, what a graph is made of,
the check in float64, and the whole with graphs that are plain calls on the CPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fp4linear
from fp4linear import _core, bench
from fp4linear.bench import choice, graphs, report, suites
from fp4linear.bench import gpu as gpu_module
from fp4linear.bench.choice import choose_device
from fp4linear.bench.device import random_weight
from fp4linear.bench.gpu import Gpu, last_writers
from fp4linear.bench.gpu_bandwidth import limit_of
from fp4linear.bench.suites import Item, Part
from fp4linear.cli import app

needs_torch = pytest.mark.torch
if importlib.util.find_spec("torch"):
    import torch

H200 = {"index": 0, "name": "NVIDIA H200", "sm": 90, "sm_count": 132, "memory": 1 << 37}


def info(*devices: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"built": True, "build_info": "", "architectures": "90a", "devices": list(devices), "reason": reason}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cuda_info", lambda: info(H200))


def with_torch(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True, missing: bool = False) -> None:
    """What `import torch` gives."""
    fake = types.SimpleNamespace(__version__="9.9+cpu", cuda=types.SimpleNamespace(is_available=lambda: cuda))

    def load(name: str) -> Any:
        if missing:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return fake

    monkeypatch.setattr(choice.importlib, "import_module", load)


def test_the_device_is_a_gpu_where_torch_can_use_it(monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> None:
    with_torch(monkeypatch)
    assert choose_device(None).name == "cuda:0"
    assert "H200" in choose_device(None).why
    assert choose_device("cuda").index == 0
    assert choose_device("cpu").name == "cpu"
    for option in ("--threads", "--isa"):
        assert choose_device(None, cpu_option=option).name == "cpu"
        with pytest.raises(ValueError, match=option):
            choose_device("cuda", cpu_option=option)


@pytest.mark.parametrize(
    ("facts", "message"),
    [({"missing": True}, r"pip install 'fp4linear\[torch\]'"), ({"cuda": False}, r"torch 9\.9\+cpu sees no GPU")],
)
def test_a_gpu_without_a_torch_that_can_use_it(
    monkeypatch: pytest.MonkeyPatch, one_gpu: None, facts: dict[str, bool], message: str
) -> None:
    with_torch(monkeypatch, **facts)
    chosen = choose_device(None)
    assert chosen.index is None
    assert re.search(message, chosen.why)
    with pytest.raises(ValueError, match=message):
        choose_device("cuda:0")


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(monkeypatch)
    monkeypatch.setattr(_core, "cuda_info", lambda: info(reason="no driver"))
    assert choose_device(None) == choice.Choice(None, "no GPU: no driver")
    with pytest.raises(ValueError, match=r"device: got 'cuda'.*no driver"):
        choose_device("cuda")


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", ""])
def test_a_device_that_is_none(one_gpu: None, text: str) -> None:
    with pytest.raises(ValueError, match="expected cpu, cuda or cuda:N"):
        choose_device(text)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch, one_gpu: None) -> None:
    with_torch(monkeypatch)
    with pytest.raises(ValueError, match=r"cuda:3.*GPUs here: 0"):
        choose_device("cuda:3")


def test_the_command_says_which_device_and_why() -> None:
    result = CliRunner().invoke(
        app, ["bench", "--device", "cpu", "--hot", "--seconds", "0", "--shape", "32x64", "--dtype", "fp32"]
    )
    assert result.exit_code == 0
    assert "device cpu: --device cpu" in result.output


def test_what_was_measured_before_an_error_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--device", "cpu", "--hot", "--seconds", "0", "--path", "gemv_scalar", "--dtype", "fp32"]
    good = bench.run

    def second_fails(device: Any, items: list[Item], **more: Any) -> Any:
        yield from good(device, [dataclasses.replace(items[0], path="cpu_gemm")], **more)
        yield from good(device, items[1:], **more)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="gemv_scalar"):
        patch.setattr(bench, "run", second_fails)
        arguments = ["bench", *options, "--shape", "32x64", "--m", "1,2", "--json", str(out)]
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert [json.loads(line)["path"] for line in out.read_text().splitlines()] == ["cpu_gemm"]


def test_suites_of_a_gpu() -> None:
    decode = suites.suite("decode", "cuda:0")
    assert [item.m for item in decode[:4]] == [1, 2, 4, 8]
    assert list(dict.fromkeys((item.n, item.k) for item in decode)) == [
        (512, 2048), (2048, 512), (4096, 4096), (11008, 4096), (17408, 5120), (5120, 17408), (28672, 8192),
        (248320, 2048),
    ]  # fmt: skip
    assert suites.suite("default", "cuda:0") == decode
    assert {(i.n, i.k) for i in suites.suite("prefill", "cuda")} == {(4096, 4096), (11008, 4096)}
    assert {i.m for i in suites.suite("prefill", "cuda")} == {1 << e for e in range(4, 13)}
    for name in suites.NAMES:
        assert all(part.n > 0 and part.k % 2 == 0 for item in suites.suite(name, "cuda") for part in item.parts)


def test_the_qwen_step() -> None:
    (step,) = suites.suite("qwen-step", "cuda")
    assert (step.m, sum(part.layers for part in step.chain)) == (4, 121)
    assert [(p.sets, p.n, p.k, p.m) for p in step.parts] == [
        (80, 512, 2048, 4),
        (40, 2048, 512, 4),
        (1, 248320, 2048, 4),
    ]
    order = graphs.interleave([80, 40, 1])
    assert [part for part, _ in order] == [0, 0, 1] * 40 + [2]
    assert sorted(order) == [(part, i) for part, count in enumerate((80, 40, 1)) for i in range(count)]
    with pytest.raises(ValueError, match="CUDA graph"):
        suites.suite("qwen-step")
    assert suites.vary([step], m=[1, 8])[1].parts[0].m == 8


def test_weight_sets_and_launches() -> None:
    assert graphs.weight_sets(589_824, 250_000_000, 2048) == 424
    assert graphs.weight_sets(286_000_000, 250_000_000, 2048) == 2
    assert graphs.weight_sets(1152, 250_000_000, 2048) == 2048
    assert [graphs.rotation(sets) for sets in (1, 2, 3, 5, 8, 424)] == [8, 8, 9, 10, 8, 424]
    assert graphs.longer(8, 1.0) == 8
    assert graphs.longer(10, graphs.GRAPH_SECONDS / 2.5) == 30
    assert graphs.longer(8, 1e-9) == graphs.MOST_LAUNCHES
    assert graphs.longer(2048, 1e-9) == 2048


def test_last_writers() -> None:
    assert last_writers([(0, i) for i in range(9)], [3]) == [[6, 7, 8]]
    assert last_writers([(0, i) for i in range(10)], [4]) == [[8, 9, 6, 7]]
    assert last_writers(graphs.interleave([4, 2]), [2, 2]) == [[2, 3], [0, 1]]


def test_sides_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MIN_ROUNDS", 3)
    taken: list[str] = []

    class Fake:
        def __init__(self, name: str, seconds: float) -> None:
            self.name, self.seconds = name, seconds

        def turn(self) -> list[float]:
            taken.append(self.name)
            return [self.seconds, 3 * self.seconds]

    samples = graphs.alternate({"ours": Fake("ours", 1.0), "dense": Fake("dense", 2.0)}, 0)
    assert taken == ["ours", "dense"] * 3
    assert (samples["ours"].median, samples["dense"].median, len(samples["ours"].all)) == (2.0, 4.0, 6)


def test_a_graph_is_warmed_up_captured_and_timed_by_its_replays() -> None:
    log: list[str] = []
    clock = itertools.count(step=4.0)  # milliseconds, at each event

    class Context:
        def __init__(self, *args: Any, stream: Any = None) -> None:
            self.name = type(args[0]).__name__ if args else ""

        def __enter__(self) -> None:
            log.append(f"in {self.name}")

        def __exit__(self, *_: object) -> None:
            log.append("out")

        def wait_stream(self, _: Any) -> None: ...

    class CudaGraph:
        def replay(self) -> None:
            log.append("replay")

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("event")
            self.at = next(clock)

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    cuda = types.SimpleNamespace(
        Stream=Context, current_stream=Context, stream=Context, graph=Context, CUDAGraph=CudaGraph, Event=Event,
        synchronize=lambda: log.append("wait"),
    )  # fmt: skip
    graph = graphs.Graph(types.SimpleNamespace(cuda=cuda), [lambda: log.append("a"), lambda: log.append("b")], 2)
    timed = ["replay", "event", "replay", "event", "replay", "event", "wait"]
    assert log == ["in Context", "a", "b", "out", "wait", "in CudaGraph", "a", "b", "out", *timed]
    assert graph.seconds == pytest.approx(4e-3)
    assert graph.turn() == pytest.approx([2e-3] * math.ceil(graphs.TURN_SECONDS / 4e-3))


def test_limits_are_those_of_named_gpus() -> None:
    assert limit_of("NVIDIA H200") == 4.4e12
    assert limit_of("NVIDIA H100 80GB HBM3") is None


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("n", "k", "m"), [(96, 80, 3), (5, 1000, 1), (40, 24, 40)])
def test_the_check_is_the_reference(monkeypatch: pytest.MonkeyPatch, dtype: str, n: int, k: int, m: int) -> None:
    from fp4linear.bench import gpu_accuracy

    monkeypatch.setattr(gpu_accuracy, "CHUNK_WEIGHTS", 7 * k)  # several chunks, the last one short
    random = np.random.default_rng(n)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.integers(0, 0x7F, (n, -(-k // 16)), dtype=np.uint8)
    scales[::3] |= 0x80
    x = torch.from_numpy(random.standard_normal((m, k))).to(getattr(torch, dtype))
    ref = fp4linear.reference(x.double().numpy(), b, scales, np.float32(0.25))
    check = gpu_accuracy.Check(torch, torch.tensor(b), torch.tensor(scales), 0.25, x, dtype)
    tokens = check.tokens.tolist()
    assert len(tokens) == min(m, 16) and tokens[-1] == m - 1
    np.testing.assert_allclose(check.ref.numpy(), ref[tokens], rtol=1e-12, atol=1e-12)

    y = torch.from_numpy(ref).to(getattr(torch, dtype))
    assert check.compare([(y, 0), (y.roll(-2, 1), 2)]).good
    assert not check.compare([(y, 0), (y, 1)]).good
    assert not check.compare([(y.roll(1, 0) if m > 1 else -y, 0)]).good
    for wrong in (math.nan, math.inf):
        damaged = y.clone()
        damaged[m - 1, n - 1] = wrong
        assert check.compare([(damaged, 0), (y, 0)]).tolerance_used == math.inf
    if dtype != "bfloat16":  # NumPy's check gives the same number
        slightly = (y.double() * (1 + 2.0**-9)).to(y.dtype)
        theirs = bench.measure(x.double().numpy(), slightly.numpy(), b, scales, 0.25, sample=m > 16)
        assert check.compare([(slightly, 0)]).tolerance_used == pytest.approx(theirs.tolerance_used)


class Eager:
    """A graph's functions, without a graph."""

    def __init__(self, calls: Any, share: int) -> None:
        self.calls, self.share, self.seconds, self.turns = calls, share, graphs.GRAPH_SECONDS / 2, 0
        self.replay()

    def replay(self) -> None:
        for call in self.calls:
            call()

    def turn(self) -> list[float]:
        self.turns += 1
        return [len(self.calls) * 1e-6 / self.share]


class OnCpu(Gpu):
    """The GPU's code with torch tensors, layers and plain calls of the CPU."""

    def __init__(self, *, dense: bool = True) -> None:
        self._dense, self._torch, self.name, self.model, self.limit = dense, torch, "cpu", "NVIDIA H200", 4.4e12
        self._isa, self._kept, self._bandwidth = "sm90", {}, None
        self.graphs: list[Eager] = []

    def _read_bandwidth(self) -> tuple[float, str]:
        return 4e12, "a kernel"

    def _capture(self, calls: Any, share: int) -> Any:
        self.graphs.append(Eager(calls, share))
        return self.graphs[-1]


@needs_torch
def test_a_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "COLD_BYTES", 20_000)
    device = OnCpu()
    items = [Item(48, 96, m, "float16", cold=cold) for cold in (True, False) for m in (1, 3)]
    records = list(bench.run(device, items, seconds=0))
    packed = 48 * (48 + 6)
    for record, item in zip(records, items, strict=True):
        sets = -(-20_000 // packed) if item.cold else 1
        assert (record.n, record.k, record.m, record.dtype) == (48, 96, item.m, "float16")
        assert (record.path, record.isa, record.device_model) == ("cpu_gemv", "sm90", "NVIDIA H200")
        assert (record.weight_sets, record.weights) == (sets, "cold" if item.cold else "hot")
        assert record.launches == 2 * graphs.rotation(sets)  # half as long as it should be: twice
        assert 0 < record.tolerance_used <= 1
        assert record.us == pytest.approx(1) and record.dense_us == pytest.approx(1)
        assert record.gb_s == pytest.approx(packed / 1e-6 / 1e9)
        assert record.gflop_s == pytest.approx(2 * 48 * 96 * item.m / 1e-6 / 1e9)
        wanted = (record.gb_s / 4000, record.gb_s / 4400) if item.cold else (None, None)
        assert (record.bandwidth_share, record.limit_share) == pytest.approx(wanted)
        json.dumps(record.as_dict(), allow_nan=False)
    table = report.table([dataclasses.replace(record, device="cuda:0") for record in records])
    assert table.row_count == 4
    assert {"TB/s", "of BW", "of limit", "TFLOP/s"} <= {column.header for column in table.columns}
    # The weight sets of a rotation differ: each is the one before with its rows moved.
    layers = device._make(items[0], random_weight(48, 96)).layers
    first = [layer.canonical()[0] for layer in layers]
    assert (first[1] == np.roll(first[0], -1, 0)).all()
    assert all((a != b).any() for a, b in itertools.pairwise(first))


@needs_torch
def test_layers_below_the_cold_size_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "MOST_SETS", 3)
    (record,) = bench.run(OnCpu(dense=False), [Item(1, 64, 1, "float32")], seconds=0)
    assert (record.weights, record.weight_sets) == ("L2", 3)
    assert (record.bandwidth_share, record.limit_share, record.dense_us, record.dense) == (None, None, None, "")


@needs_torch
def test_outputs_are_shared_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "COLD_BYTES", 20_000)
    monkeypatch.setattr(gpu_module, "OUT_BYTES", 3 * 5 * 48 * 2)
    device = OnCpu()
    prepared = device.prepare(Item(48, 96, 5, "float16"), random_weight(48, 96))
    assert (len(prepared.outs), len(prepared.layers)) == (3, 8)
    assert device.time([prepared], 0).accuracy.good


CHAIN = Item(0, 0, 2, "float16", label="small", chain=(Part(4, 32, 64), Part(2, 64, 32), Part(1, 96, 64)))


@needs_torch
def test_a_chain_is_one_graph() -> None:
    device = OnCpu()
    (record,) = bench.run(device, [CHAIN], seconds=0)
    assert [len(graph.calls) for graph in device.graphs] == [7, 7]
    assert [graph.turns for graph in device.graphs] == [graphs.MIN_ROUNDS] * 2
    assert (record.n, record.k, record.label, record.launches, record.weight_sets) == (None, None, "small", 7, 7)
    packed, operations = (sum(c * n * f(k) for c, n, k in CHAIN.chain) for f in (lambda k: k * 9 / 16, lambda k: 4 * k))
    assert record.us == pytest.approx(7)
    assert record.gb_s == pytest.approx(packed / 7e-6 / 1e9)
    assert record.gflop_s == pytest.approx(operations / 7e-6 / 1e9)
    assert record.path == "cpu_gemv" and record.good and record.weights == "L2"
    assert "7 calls" in str(list(report.table([record]).columns[1].cells))


@needs_torch
@pytest.mark.parametrize("fault", ["another layer's weights", "nothing written", "one element"])
def test_faults_in_the_graph_show(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """The eager call is right: only the replay is wrong, and only that of the last layer."""
    monkeypatch.setattr(gpu_module, "COLD_BYTES", 10_000)
    device = OnCpu()
    prepared = device.prepare(Item(48, 96, 2, "float16"), random_weight(48, 96))
    good = gpu_module.forward

    def bad(layer: Any, x: Any, out: Any, path: str) -> None:
        if layer is not prepared.layers[-1]:
            good(layer, x, out, path)
        elif fault == "another layer's weights":
            good(prepared.layers[0], x, out, path)
        elif fault == "one element":
            good(layer, x, out, path)
            out[1, 47] += 1

    assert device.verify(prepared).accuracy.good
    assert device.time([prepared], 0).accuracy.good
    monkeypatch.setattr(gpu_module, "forward", bad)
    assert not device.time([prepared], 0).accuracy.good


@needs_torch
def test_another_path_in_the_graph_is_an_error() -> None:
    layer = fp4linear.Fp4Linear(np.zeros((32, 32), np.uint8), np.zeros((32, 4), np.uint8), 1.0, path="cpu_gemm")
    x = torch.zeros(1, 64)
    gpu_module.forward(layer, x, torch.empty(1, 32), "cpu_gemm")
    with pytest.raises(RuntimeError, match="cpu_gemm ran in the graph, expected cpu_gemv"):
        gpu_module.forward(layer, x, torch.empty(1, 32), "cpu_gemv")


@needs_torch
def test_options_of_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="isa"):
        OnCpu().prepare(Item(32, 64, 1, isa="portable"), random_weight(32, 64))


@pytest.mark.gpu
@needs_torch
def test_the_command_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    options = ["--device", "cuda", "--shape", "256x512", "--m", "1,4,64", "--seconds", "0", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["m"] for record in records] == [1, 4, 64]
    weight = random_weight(256, 512)
    layer = fp4linear.Fp4Linear(weight.b, weight.scales, weight.scale2, device="cuda")
    for record in records:
        assert record["path"] == layer.plan(record["m"]).path
        assert 0 <= record["tolerance_used"] <= 1
        assert record["launches"] >= graphs.LEAST_LAUNCHES
        assert record["us"] > 0 and record["dense_us"] > 0
        assert record["device"] == "cuda:0" and record["isa"].startswith("sm")


@pytest.mark.gpu
@needs_torch
def test_a_chain_on_a_gpu() -> None:
    (record,) = bench.run(Gpu(), [Item(0, 0, 4, chain=(Part(8, 512, 2048), Part(4, 2048, 512)))], seconds=0)
    assert (record.launches, record.weight_sets, record.weights) == (12, 12, "L2")
    assert record.good and record.us > 0


@pytest.mark.gpu
@needs_torch
def test_read_bandwidth_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4linear.bench import gpu_bandwidth

    monkeypatch.setattr(gpu_bandwidth, "READ_BYTES", 1 << 28)
    rate, reader = gpu_bandwidth.read_bandwidth(torch, "cuda:0")
    assert rate > 0 and reader
