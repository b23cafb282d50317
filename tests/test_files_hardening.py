"""What fuzzing found, and what no file may do: take memory that it only claims, end the process, run code."""

from __future__ import annotations

import ast
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import fp4linear
from fp4linear.files import FormatError, convert_file, inspect, layers, open_tensors, read_layer
from fp4linear.files.gguf_file import GGUFFile
from fp4linear.files.safetensors_file import SafetensorsFile
from tests.checkpoints import (
    f8,
    file_bytes,
    gguf_blocks,
    gguf_bytes,
    modelopt,
    single_file,
    u8,
    weight_bytes,
    write_file,
)
from tests.child import ROOT, run_child


def test_lone_surrogates_are_no_text(tmp_path: Path) -> None:
    """They were kept in the header's metadata and file names, and failed where somebody wrote them."""
    path = tmp_path / "m.safetensors"
    for header in (b'{"__metadata__":{"a":"\\ud800"}}', b'{"\\udfff":0}', b'{"__metadata__":{"\\uD800":"a"}}'):
        path.write_bytes(file_bytes(header))
        with pytest.raises(FormatError, match="surrogates"):
            SafetensorsFile(path)
    path.write_bytes(file_bytes(b'{"__metadata__":{"a":"\\ud83d\\ude00"}}'))
    assert SafetensorsFile(path).metadata == {"a": "\N{GRINNING FACE}"}
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(b'{"weight_map":{"p.weight":"\\ud800.safetensors"}}')
    with pytest.raises(FormatError, match="surrogates"):
        open_tensors(index)


@pytest.mark.parametrize("shape", [[2**50, 0], [0, 2**50], [2**24 + 1, 0], [2**31, 0, 3]])
def test_empty_tensors_claim_no_memory(tmp_path: Path, shape: list[int]) -> None:
    """No data bound the other axes, along which fused layers got a factor a row: 4 PiB of them."""
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes({"p.weight": {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}))
    with pytest.raises(FormatError, match="impossible"):
        layers(path)
    path.write_bytes(gguf_bytes({"p.weight": (24, shape, b"")}))
    with pytest.raises(FormatError, match="impossible"):
        layers(path)


def test_empty_arrays_that_no_reader_takes_are_not_written(tmp_path: Path) -> None:
    b, scales = weight_bytes(4, 32, 1)
    arrays = {"p.weight": b, "p.weight_scale": scales, "p.weight_scale_2": np.float32(0.5)}
    arrays["more"] = np.broadcast_to(np.uint8(0), (0, 2**31))
    with pytest.raises(FormatError, match=r"'more'.*impossible"):
        convert_file(arrays, tmp_path / "out.safetensors", "modelopt")
    assert list(tmp_path.iterdir()) == []


CLAIMS = """
    import resource, sys
    from pathlib import Path
    from fp4linear.files import FormatError, layers
    from tests.checkpoints import file_bytes, gguf_bytes, gguf_text
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), -1))   # a claim that is believed ends as MemoryError
    path = Path(sys.argv[1])
    entry = {"dtype": "U8", "shape": [2**59], "data_offsets": [0, 2**59]}
    number = lambda value, size: value.to_bytes(size, "little")
    files = [
        file_bytes(b"{}", length=2**60), file_bytes(b"{}", length=2**27), file_bytes({"p.weight": entry}),
        file_bytes({"p.weight": entry | {"data_offsets": [2**59, 2**60]}}),
        gguf_bytes({"p.weight": (40, [2**40, 2**14], b"")}), gguf_bytes({"p.weight": (0, [2**59], b"")}),
        gguf_bytes({}, pair_count=2**60), b"GGUF" + number(3, 4) + number(2**60, 8) + number(0, 8),
        gguf_bytes({}, gguf_text("a") + number(9, 4) + number(0, 4) + number(2**60, 8), 1),
        gguf_bytes({}, gguf_text("a") + number(9, 4) + number(8, 4) + number(2**60, 8), 1),
        gguf_bytes({}, gguf_text("a") + number(8, 4) + number(2**60, 8), 1), gguf_bytes({}, number(2**60, 8), 1),
    ]
    for content in files:
        path.write_bytes(content)
        try: layers(path)
        except FormatError: continue
        raise AssertionError(content[:80])
    print("done")
"""


def test_sizes_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    assert run_child(CLAIMS, arguments=(str(tmp_path / "claims"),)).stdout == "done\n"


def test_a_sparse_file_of_terabytes_costs_its_header(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    size = 2**42
    header = {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    path.write_bytes(file_bytes(header))
    try:
        os.truncate(path, path.stat().st_size + size)
    except OSError as error:
        pytest.skip(f"this file system has no such files: {error}")
    try:
        assert layers(path) == [] and open_tensors(path).info("x").nbytes == size
    except FormatError as error:  # a machine that maps no more than its memory
        assert "can't be read" in str(error)


def test_names_that_look_like_members_of_a_stack(tmp_path: Path) -> None:
    """`e[0].weight` is a layer of its own: it was looked for as the first of a stack that isn't there."""
    b, scales = weight_bytes(6, 64, 7)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({"e[0].weight": (40, [6, 64], gguf_blocks(b, scales))}))
    assert [(found.name, found.problem) for found in layers(path)] == [("e[0]", None)]
    assert np.array_equal(fp4linear.load(path, "e[0]").canonical()[0], b)
    stacks = {"s[1].weight": u8(np.stack([b, b])), "s[1].weight_scale": f8(np.stack([scales, scales]))}
    stacks["s[1].weight_scale_2"] = ("F32", [], np.float32(1).tobytes())
    path = write_file(tmp_path / "m.safetensors", stacks)
    assert [found.name for found in layers(path)] == ["s[1][0]", "s[1][1]"]
    assert np.array_equal(read_layer(open_tensors(path), "s[1][1]").b, b)
    path = write_file(tmp_path / "q.safetensors", modelopt("x[2]", 8, 32, 1, 0.5))
    (layer,) = convert_file(path, tmp_path / "out.safetensors", "compressed-tensors")
    assert layer.name == "x[2]"


def test_gguf_scale_of_no_element(tmp_path: Path) -> None:
    b, scales = weight_bytes(6, 64, 7)
    tensors = {"p.weight": (40, [6, 64], gguf_blocks(b, scales)), "p.scale": (0, [0], b"")}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors))
    with pytest.raises(FormatError, match=r"'p\.scale': shape \[0\]"):
        read_layer(open_tensors(path), "p")


def test_no_mark_of_the_source_survives_a_conversion(tmp_path: Path) -> None:
    """X.comfy_quant was copied where another format was asked for: the output read back with its nibbles swapped."""
    path = write_file(
        tmp_path / "m.safetensors", single_file("p", 20, 96, 3, 0.01, high=False, mark={"format": "nvfp4"})
    )
    source = read_layer(open_tensors(path), "p", "modelopt-diffusers")
    out = tmp_path / "out.safetensors"
    convert_file(path, out, "modelopt", format="modelopt-diffusers")
    assert "p.comfy_quant" not in open_tensors(out)
    assert np.array_equal(read_layer(open_tensors(out), "p").b, source.b)


def test_a_file_that_is_cut_while_it_is_mapped(tmp_path: Path) -> None:
    """Reading what is gone would end the process with SIGBUS."""
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 500, 1024, 1, 0.5))
    tensors = open_tensors(path)
    os.truncate(path, 1000)
    with pytest.raises(FormatError, match="truncated since it was opened"):
        fp4linear.load(tensors, "p")
    (report,) = inspect(tensors).layers
    assert "truncated since it was opened" in (report.problem or "")
    b, scales = weight_bytes(64, 1024, 7)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({"p.weight": (40, [64, 1024], gguf_blocks(b, scales))}))
    file = GGUFFile(path)
    os.truncate(path, 0)
    with pytest.raises(FormatError, match="truncated since it was opened"):
        file.array("p.weight")


def test_a_replaced_file_stays_what_it_was(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.safetensors", modelopt("p", 8, 32, 1, 0.5))
    tensors = open_tensors(path)
    write_file(tmp_path / "new", modelopt("p", 8, 32, 2, 0.5))
    os.replace(tmp_path / "new", path)
    assert np.array_equal(fp4linear.load(tensors, "p").canonical()[0], weight_bytes(8, 32, 1)[0])


def test_pipes_and_devices_are_no_files(tmp_path: Path) -> None:
    """A pipe has no size, and opening it would wait for a writer for ever."""
    pipe = tmp_path / "a.safetensors"
    os.mkfifo(pipe)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"p.weight": pipe.name}}))
    (tmp_path / "config.json").symlink_to("/dev/zero")
    done: list[str] = []

    def attempt() -> None:
        for path in (index, pipe):
            with pytest.raises(FormatError, match=r"not a regular file|no such file"):
                open_tensors(path).info("p.weight")
        with pytest.raises(FormatError, match="not a regular file"):
            SafetensorsFile(pipe)
        with pytest.raises(FormatError, match="not a regular file"):
            GGUFFile(pipe)
        done.append("done")

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)
    assert done == ["done"]


def test_paths_that_no_file_can_have(tmp_path: Path) -> None:
    for path in ("a" * 5000, str(tmp_path / ("b" * 300))):
        with pytest.raises(FormatError):
            open_tensors(path)


RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "runpy", "imp"}


def test_no_loader_can_execute_a_file() -> None:
    """No module that reads files imports what runs code, and none evaluates, unpickles or loads through others."""
    sources = [path for part in ("files", "onnx") for path in (ROOT / "src/fp4linear" / part).rglob("*.py")]
    assert len(sources) > 30
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & RUNS_CODE, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "compile", "__import__", "np.load", "torch.load"), (path, called)
            if isinstance(node, ast.keyword):
                assert node.arg != "allow_pickle", path


@pytest.mark.parametrize("content", [b"\x80\x04\x95", b"PK\x03\x04", b"\x80\x02c__builtin__\nexit\n(tR."])
def test_pickles_are_refused_unread(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content + bytes(100))
    with pytest.raises(FormatError):
        layers(path)
