"""GGUF: type 40 to the bit, and a parser that believes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp4linear
from fp4linear.files import FormatError, layers, open_tensors
from tests.checkpoints import gguf_blocks, gguf_bytes, gguf_text, weight_bytes

N, K = 6, 128


def valid(*, scale: float | None = 0.5, bias: bool = True) -> bytes:
    b, scales = weight_bytes(N, K, 8)
    tensors = {"blk.0.attn_q.weight": (40, [N, K], gguf_blocks(b, scales))}
    if scale is not None:
        tensors["blk.0.attn_q.scale"] = (0, [1], np.float32(scale).tobytes())
    if bias:
        tensors["blk.0.attn_q.bias"] = (0, [N], np.arange(N, dtype="f4").tobytes())
    tensors["token_embd.weight"] = (2, [4, 32], bytes(4 * 18))
    return gguf_bytes(tensors)


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("scale", [None, 0.5])
def test_type_40(tmp_path: Path, scale: float | None) -> None:
    path = write(tmp_path, valid(scale=scale))
    for source in (path, tmp_path):
        (info,) = layers(source)
        assert (info.name, info.format, info.problem, info.shape) == ("blk.0.attn_q", "gguf", None, (N, K))
    layer = fp4linear.load(path, "blk.0.attn_q.weight")
    b, scales = weight_bytes(N, K, 8)
    got = layer.canonical()
    assert np.array_equal(got[0], b)
    assert np.array_equal(got[1], scales)
    assert got[2] == (1.0 if scale is None else scale)
    assert layer.forward(np.zeros((1, K), np.float32)).tolist() == [list(range(N))]
    assert open_tensors(path).info("token_embd.weight").dtype == "GGUF_Q4_0"


def test_i5_one_block(tmp_path: Path) -> None:
    block = bytes([0x38, 0x40, 0x7F, 0x01]) + bytes(7 * i % 256 for i in range(32))
    path = write(tmp_path, gguf_bytes({"p.weight": (40, [1, 64], block)}))
    w = fp4linear.load(path, "p").dequantize()[0]
    first = [0, 6, -4, 3, -2, 1.5, -1, 0.5, 0, 0, 0, 0.5, 0.5, 1, 1, 1.5]
    second = [0, -12, 8, -6, 4, -3, 2, -1, 3, 3, 4, 4, 6, 6, 8, 8]
    assert w[:16].tolist() == first
    assert w[16:32].tolist() == second
    assert not w[32:48].any()  # 0x7F reads as 0
    assert w[48:51].tolist() == [0, -0.01171875, 0.0078125]


@pytest.mark.parametrize("scale", [None, "one", "each"])
def test_experts(tmp_path: Path, scale: str | None) -> None:
    experts = 3
    made = [weight_bytes(N, K, 30 + e) for e in range(experts)]
    raw = b"".join(gguf_blocks(b, scales) for b, scales in made)
    bias = np.random.default_rng(1).standard_normal((experts, N)).astype("f4")
    tensors = {"p.weight": (40, [experts, N, K], raw), "p.bias": (0, [experts, N], bias.tobytes())}
    factors = {None: [1.0] * 3, "one": [0.25] * 3, "each": [0.5, 0.25, 2.0]}[scale]
    if scale is not None:
        stored = np.array(factors if scale == "each" else factors[:1], "f4")
        tensors["p.scale"] = (0, [len(stored)], stored.tobytes())
    path = write(tmp_path, gguf_bytes(tensors))
    assert [layer.name for layer in layers(path)] == ["p[0]", "p[1]", "p[2]"]
    for e in range(experts):
        layer = fp4linear.load(path, f"p[{e}]")
        assert np.array_equal(layer.canonical()[0], made[e][0])
        assert np.array_equal(layer.canonical()[1], made[e][1])
        assert layer.canonical()[2] == factors[e]
        assert np.array_equal(layer.forward(np.zeros((1, K), np.float32))[0], bias[e])
    with pytest.raises(FormatError, match="holds 3 experts: name one"):
        fp4linear.load(path, "p")
    with pytest.raises(FormatError, match="no such layer"):
        fp4linear.load(path, "p[3]")


@pytest.mark.parametrize("shape", [[0, 64], [3, 0], [0, 0]])
def test_empty_layers(tmp_path: Path, shape: list[int]) -> None:
    path = write(tmp_path, gguf_bytes({"p.weight": (40, shape, b"")}))
    layer = fp4linear.load(path, "p")
    assert [layer.out_features, layer.in_features] == shape
    stack = write(tmp_path, gguf_bytes({"p.weight": (40, [2**17, *shape], b"")}))
    assert [(found.name, found.problem is None) for found in layers(stack)] == [("p", False)]
    claimed = write(tmp_path, gguf_bytes({"p.weight": (40, [2**40, *shape], b"")}))
    with pytest.raises(FormatError, match="impossible"):
        layers(claimed)


def test_signed_scales_and_mxfp4_are_refused(tmp_path: Path) -> None:
    b, scales = weight_bytes(1, 64, 1)
    path = write(tmp_path, gguf_bytes({"p.weight": (40, [1, 64], gguf_blocks(b, scales | 0x80))}))
    with pytest.raises(FormatError, match="unsigned in GGUF"):
        fp4linear.load(path, "p")
    path = write(tmp_path, gguf_bytes({"p.weight": (39, [1, 64], bytes(34))}))
    with pytest.raises(FormatError, match="MXFP4 is not supported"):
        fp4linear.load(path, "p")


def test_key_value_pairs_and_alignment(tmp_path: Path) -> None:
    b, scales = weight_bytes(2, 64, 1)
    array = gguf_text("tokens") + bytes([9, 0, 0, 0, 8, 0, 0, 0]) + (2).to_bytes(8, "little") + gguf_text("a") * 2
    name = gguf_text("general.name") + bytes([8, 0, 0, 0]) + gguf_text("x" * 99)
    align = gguf_text("general.alignment") + bytes([4, 0, 0, 0]) + (256).to_bytes(4, "little")
    tensors = {"a.weight": (40, [2, 64], gguf_blocks(b, scales)), "b": (0, [3], bytes(12)), "c": (0, [1], bytes(4))}
    path = write(tmp_path, gguf_bytes(tensors, array + name + align, 3, alignment=256))
    assert np.array_equal(fp4linear.load(path, "a").canonical()[0], b)
    assert open_tensors(path).array("b").tolist() == [0, 0, 0]


HUGE = (2**62).to_bytes(8, "little")


def info(name: str, shape: list[int], number: int, offset: int) -> bytes:
    sizes = b"".join(size.to_bytes(8, "little") for size in reversed(shape))
    text = gguf_text(name) + len(shape).to_bytes(4, "little") + sizes
    return text + number.to_bytes(4, "little") + offset.to_bytes(8, "little")


def head(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + b"".join(v.to_bytes(s, "little") for v, s in ((version, 4), (tensors, 8), (pairs, 8)))


DAMAGED = [
    (head(0, 0)[:20], "expected at least 24"),
    (head(0, 0, 1), "version 1"),
    (head(2**63, 0), "truncated"),
    (head(0, 2**63), "truncated"),
    (head(0, 1) + HUGE, "key of"),
    (head(0, 1) + gguf_text("k") + bytes([8, 0, 0, 0]) + HUGE, "truncated"),
    (head(0, 1) + gguf_text("k") + bytes([9, 0, 0, 0, 4, 0, 0, 0]) + HUGE, "truncated"),
    (head(0, 1) + gguf_text("k") + bytes([9, 0, 0, 0, 8, 0, 0, 0]) + HUGE, "truncated"),
    (head(0, 1) + gguf_text("k") + (bytes([9, 0, 0, 0]) + b"") + (bytes([9, 0, 0, 0]) + HUGE) * 9, "nested"),
    (head(0, 1) + gguf_text("k") + bytes([77, 0, 0, 0]), "type 77"),
    (head(0, 1) + gguf_text("general.alignment") + bytes([4, 0, 0, 0, 3, 0, 0, 0]), "power of two"),
    (head(0, 1) + gguf_text("general.alignment") + bytes([5, 0, 0, 0, 3, 0, 0, 0]), "expected uint32"),
    (head(1, 0) + (3).to_bytes(8, "little") + b"\xff\xfe\xfd" + bytes(99), "UTF-8"),
    (head(1, 0) + gguf_text("p") + (2**31).to_bytes(4, "little") + bytes(64), "axes"),
    (head(1, 0) + info("p", [2**40, 2**40], 0, 0) + bytes(64), "impossible"),
    (head(1, 0) + info("p", [2, 64], 4, 0) + bytes(64), "type 4 is unknown"),
    (head(1, 0) + info("p", [2, 63], 40, 0) + bytes(99), "64 values a block"),
    (head(1, 0) + info("p", [2, 64], 40, 0) + bytes(64), "end outside"),
    (head(1, 0) + info("p", [2**50, 64], 40, 0) + bytes(64), "end outside"),
    (head(1, 0) + info("p", [4], 0, 8) + bytes(99), "no multiple of 32"),
    (head(1, 0) + info("p", [4], 0, 2**63) + bytes(99), "end outside"),
    (head(2, 0) + info("p", [4], 0, 0) * 2 + bytes(99), "appears twice"),
    (head(2, 0) + info("p", [16], 0, 0) + info("q", [4], 0, 32) + bytes(128), "overlaps"),
]


@pytest.mark.parametrize(("data", "message"), DAMAGED, ids=lambda value: value[:16] if isinstance(value, str) else "")
def test_damaged_files(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=rf"m\.gguf.*{message}"):
        open_tensors(write(tmp_path, data))


def read_everything(path: Path) -> None:
    try:
        tensors = open_tensors(path)
        for name in tensors:
            assert tensors.array(name).nbytes == tensors.info(name).nbytes
        for layer in layers(tensors):
            fp4linear.load(tensors, layer.name, nan_scales="zero")
    except ValueError:  # FormatError, and what Fp4Linear refuses
        pass


def test_every_truncation(tmp_path: Path) -> None:
    data = valid()
    for size in range(0, len(data), 3):
        with pytest.raises(FormatError):
            open_tensors(write(tmp_path, data[:size]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 250), st.integers(0, 255)), min_size=1, max_size=6))
def test_fuzz_bytes_of_the_head(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(valid())
    for at, value in changes:
        data[at] = value
    read_everything(write(tmp_path, bytes(data)))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_fuzz_anything(tmp_path: Path, tail: bytes) -> None:
    read_everything(write(tmp_path, b"GGUF\x03\0\0\0" + tail))


def test_against_gguf_s_own_reader_and_decoder(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    if not hasattr(gguf.GGMLQuantizationType, "NVFP4"):
        pytest.skip("this gguf knows no NVFP4")
    random = np.random.default_rng(5)
    raw = random.integers(0, 256, (4, 2 * 36), dtype=np.uint8)
    raw.reshape(-1, 36)[:, :4] &= 0x7F
    path = write(tmp_path, gguf_bytes({"p.weight": (40, [4, 128], raw.tobytes())}))
    (tensor,) = gguf.GGUFReader(path).tensors
    assert np.array_equal(tensor.data, raw)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.NVFP4)
    assert np.array_equal(fp4linear.load(path, "p").dequantize(), expected)
