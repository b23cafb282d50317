"""G3. A second GPU: weights, x and y on it while the first is current, and one process that uses both."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.child import run_child
from tests.gpu.device import SPIN, to_device, to_host, torch
from tests.strategies import LayerCase
from tests.tolerance import assert_same_bits, assert_within_contract

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASE = LayerCase(*reference.make(64, 256, 3), scale2=2.0**-6)
each_m = pytest.mark.parametrize("m", [1, 8, 64])


def layer_on(index: int, path: str = "auto") -> fp4linear.Fp4Linear:
    return fp4linear.Fp4Linear(CASE.b, CASE.scales, CASE.scale2, device=f"cuda:{index}", path=path)


@each_m
@pytest.mark.parametrize("current", [0, 1])
def test_two_layers_in_turn(current: int, m: int) -> None:
    torch.cuda.set_device(current)
    layers = [layer_on(index) for index in (0, 1)]
    assert torch.cuda.current_device() == current
    values = reference.x_of(m, 256, 4)
    want = to_host(layers[0].forward(to_device(values, "cuda:0")))
    assert_within_contract(want, CASE.expected(values))
    for _ in range(3):
        for index, layer in enumerate(layers):
            x = to_device(values, f"cuda:{index}")
            for view in (x, x.repeat_interleave(2, dim=1)[:, ::2]):
                y = layer.forward(view)
                assert y.device == torch.device("cuda", index) and torch.cuda.current_device() == current
                assert_same_bits(to_host(y), want)
    for layer in layers:
        assert_same_bits(layer.canonical()[0], CASE.b)
        assert torch.cuda.current_device() == current


@each_m
def test_the_stream_of_the_weights_device(m: int) -> None:
    """Not that of the current device: the spin is on the second GPU's own side stream."""
    layer = layer_on(1)
    x = torch.full((m, 256), 7.0, dtype=torch.float16, device="cuda:1")
    want = layer.forward(torch.ones_like(x))
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SPIN)
        x.fill_(1)
        with torch.cuda.device(0):
            y = layer.forward(x)
            assert torch.cuda.current_device() == 0
    side.synchronize()
    assert torch.equal(y, want)


def test_arrays_of_the_other_device_are_refused() -> None:
    layer = layer_on(0)
    x = to_device(reference.x_of(9, 256, 4), "cuda:0")
    want = layer.forward(x)
    with pytest.raises(ValueError, match=r"\bx\b.*cuda:0.*cuda:1"):
        layer.forward(x.to("cuda:1"))
    with pytest.raises((TypeError, ValueError), match="out"):
        layer.forward(x, out=torch.zeros(9, 64, dtype=x.dtype, device="cuda:1"))
    with pytest.raises(ValueError, match=r"\bx\b"):
        layer_on(1).forward(x)
    assert torch.cuda.current_device() == 0
    assert torch.equal(layer.forward(x), want)


def test_where_a_layer_goes() -> None:
    b = to_device(CASE.b, "cuda:1")
    assert fp4linear.Fp4Linear(b, CASE.scales, 1.0).device == "cuda:1"
    assert fp4linear.Fp4Linear(b, CASE.scales, 1.0, device="cuda").device == "cuda:1"
    assert fp4linear.Fp4Linear(b, CASE.scales, 1.0, device="cuda:0").device == "cuda:0"
    for current in (0, 1):
        with torch.cuda.device(current):
            assert fp4linear.Fp4Linear(CASE.b, CASE.scales, 1.0, device="cuda").device == f"cuda:{current}"
    layer = layer_on(1)
    for made in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert made.device == "cuda:1"
    assert torch.cuda.current_device() == 0


def test_what_cuda_means_in_a_process_with_jax() -> None:
    """JAX makes the last GPU the thread's current one as it starts, and works on the first."""
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX sees no GPU")
    code = """
        import jax, numpy as np, fp4linear
        b, scales = np.zeros((3, 64), np.uint8), np.zeros((3, 8), np.uint8)
        def device():
            return fp4linear.Fp4Linear(b, scales, 1.0, device="cuda").device
        print(jax.devices("gpu")[0].id, device())
        import torch
        print(device())
        torch.cuda.set_device(1)
        print(device())
        torch.cuda.set_device(0)
        print(device())
    """
    lines = run_child(code, XLA_PYTHON_CLIENT_PREALLOCATE="false").stdout.splitlines()
    assert lines == ["0 cuda:0", "cuda:0", "cuda:1", "cuda:0"]


def test_cuda_is_what_torch_says_where_it_has_put_off_the_change() -> None:
    """The second GPU is the first that the process uses; on the way back there is no context on the first yet."""
    code = """
        import numpy as np, torch, fp4linear
        with torch.cuda.device(1):
            torch.zeros(1, device="cuda")
        layer = fp4linear.Fp4Linear(np.zeros((3, 64), np.uint8), np.zeros((3, 8), np.uint8), 1.0, device="cuda")
        print(layer.device, torch.zeros(1, device="cuda").device)
    """
    assert run_child(code).stdout == "cuda:0 cuda:0\n"


@pytest.mark.parametrize("torch_module", ["None", "types.ModuleType('torch')"])
def test_cuda_without_a_torch_that_works(torch_module: str) -> None:
    code = f"""
        import sys, types
        import numpy as np, fp4linear
        sys.modules["torch"] = {torch_module}
        layer = fp4linear.Fp4Linear(np.zeros((3, 64), np.uint8), np.zeros((3, 8), np.uint8), 1.0, device="cuda")
        print(layer.device)
    """
    assert run_child(code).stdout == "cuda:0\n"


@each_m
def test_a_graph_on_the_second_gpu(m: int) -> None:
    with torch.cuda.device(1):
        layer, eager = layer_on(1), layer_on(1)
        x = torch.zeros((m, 256), dtype=torch.float16, device="cuda:1")
        graph = torch.cuda.CUDAGraph()
        # torch keeps one stream for captures, on the GPU of the first: another GPU needs a stream of its own.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(1)):
            y = layer.forward(x)
        for seed in range(3):
            x.copy_(torch.from_numpy(reference.x_of(m, 256, seed)))
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, eager.forward(x))


def test_jax_on_the_second_gpu() -> None:
    jax = pytest.importorskip("jax")
    if len([device for device in jax.devices() if device.platform == "gpu"]) < 2:
        pytest.skip("JAX sees one GPU")
    values = reference.x_of(8, 256, 4)
    device = jax.devices("gpu")[1]
    y = layer_on(1).forward(jax.device_put(values, device))
    assert y.devices() == {device}
    assert_same_bits(np.asarray(y), to_host(layer_on(0).forward(to_device(values, "cuda:0"))))


def test_threads_on_both() -> None:
    layers = [layer_on(index) for index in (0, 1)]
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            index = seed % 2
            values = reference.x_of((1, 8, 64)[seed % 3], 256, seed)
            x = to_device(values, f"cuda:{index}")
            for _ in range(30):
                out = torch.full((len(values), 64), float("nan"), dtype=x.dtype, device=x.device)
                layers[index].forward(x, out=out)
                assert torch.cuda.current_device() == 0
            assert_within_contract(to_host(out), CASE.expected(values))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
