"""The fuzz targets of the loaders: a name, and what it does with an input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from fp4linear.files import FormatError, inspect, quantize_file
from fp4linear.files.dtypes import BITS, RAW, raw_shape
from fp4linear.files.gguf_file import TYPES
from fp4linear.files.safetensors_file import parse_json
from tests.checkpoints import Tensor, file_bytes, gguf_bytes, header_of
from tests.fuzz.choices import NONSENSE, SIZES, Choices
from tests.fuzz.oracle import PLACE, exercise, file_of, guarded, refusals
from tests.fuzz.seeds import SIDECARS, Checkpoint, GGUFTensor, checkpoints, gguf_pairs, gguf_tensors

SUFFIXES = (
    ".weight", ".weight_scale", ".weight_scale_2", ".weight_packed", ".weight_global_scale", ".bias", ".scales",
    ".scale", ".global_scale", ".comfy_quant", ".pre_quant_scale", "._weight_qdata", "._weight_scale", ".rowwise_data",
    ".rowwise_scale_inv", ".quantized_weight_values", ".quantized_weight_metadata", "_blocks", "_scales", "_packed",
    "_scale", "_scale_2", ".lora_a.weight", "[0].weight", ".input_scale", "", "\0", "é", "_bias", ".weight_zero_point",
)  # fmt: skip
NUMPY_DTYPES = (
    "u1",
    "i1",
    "?",
    "<u2",
    ">u2",
    "<u4",
    "<i4",
    "<i8",
    "<f2",
    "<f4",
    ">f4",
    "<f8",
    "<c8",
    "O",
    "S4",
    "M8[s]",
)


def damage_tensors(choices: Choices, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that a valid file can hold and no exporter would write: other dtypes, shapes, names, values."""
    result = dict(tensors)
    for _ in range(choices.below(4)):
        if not result:
            break
        name = choices.pick(tuple(result))
        dtype, shape, data = result[name]
        how = choices.below(8)
        if how == 0:
            del result[name]
        elif how == 1:
            result[choices.pick(("p", "q", "e.up", "a")) + choices.pick(SUFFIXES)] = result.pop(name)
        elif how == 2:
            same = [other for other, bits in BITS.items() if bits == BITS[dtype]]
            result[name] = (choices.pick(same), shape, data)
        elif how == 3:  # another shape of as many elements
            turned = choices.pick((shape[::-1], [1, *shape], [*shape, 1], [len(data)], [len(data) // 2, 2]))
            result[name] = (dtype, turned, data) if np.prod(turned) == np.prod(shape) else (dtype, shape, data)
        elif how == 4 and shape:  # more or fewer, with the data that go with it
            axis = choices.below(len(shape))
            sizes = [
                *shape[:axis],
                choices.pick((0, 1, 2, shape[axis] + 1, 2 * shape[axis], 16, 33)),
                *shape[axis + 1 :],
            ]
            size = int(np.prod(sizes)) * BITS[dtype] // 8
            if size < 1 << 16:
                result[name] = (dtype, sizes, (data * (size // max(len(data), 1) + 1))[:size].ljust(size, b"\1"))
        elif how == 5:
            special = choices.pick((b"\x7f", b"\xff", b"\0", b"\x80", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\x01\0\0\0"))
            result[name] = (dtype, shape, (special * len(data))[: len(data)])
        elif how == 6 and data:
            at = choices.below(len(data))
            result[name] = (dtype, shape, data[:at] + bytes([choices.byte()]) + data[at + 1 :])
        elif how == 7:  # nothing along one axis, and as much as one likes along the others
            sizes = [choices.size() for _ in range(1 + choices.below(3))]
            sizes[choices.below(len(sizes))] = 0
            result[name] = (dtype, sizes, b"")
    return result


def damage_header(choices: Choices, header: dict[str, Any]) -> dict[str, Any]:
    """Entries that lie."""
    for _ in range(choices.below(3)):
        names = [name for name in header if isinstance(header[name], dict) and "shape" in header[name]]
        if not names:
            break
        name = choices.pick(names)
        entry = dict(header[name])
        how = choices.below(8)
        if how == 0:
            entry[choices.pick(("dtype", "shape", "data_offsets", "more"))] = choices.pick(NONSENSE)
        elif how == 1:
            del entry[choices.pick(tuple(entry))]
        elif how == 2:
            entry["dtype"] = choices.pick((*BITS, "F6", "u8", "F128"))
        elif how == 3 and isinstance(entry.get("shape"), list) and entry["shape"]:
            shape = list(entry["shape"])
            axis = choices.below(len(shape))
            shape[axis] = choices.number(shape[axis]) if type(shape[axis]) is int else choices.size()
            entry["shape"] = shape
        elif how == 4:
            entry["shape"] = [choices.size() for _ in range(choices.below(40))]
        elif how in (5, 6):
            offsets = entry.get("data_offsets")
            if isinstance(offsets, list) and len(offsets) == 2 and all(type(end) is int for end in offsets):
                changed = list(offsets)
                which = choices.below(2)
                changed[which] = choices.number(changed[which])
                entry["data_offsets"] = changed
        elif how == 7:
            header[choices.pick(("p.weight", "p.bias", "__metadata__"))] = choices.pick(NONSENSE)
        header[name] = entry
    return header


def damage_metadata(choices: Choices, metadata: dict[str, str]) -> dict[str, Any]:
    result: dict[str, Any] = dict(metadata)
    for _ in range(choices.below(3)):
        key = choices.pick((*result, "_quantization_metadata", "p.weight", "hf_quant_config", "tensor_names", "x"))
        how = choices.below(3)
        if how == 0:
            result[key] = choices.pick(NONSENSE)
        elif how == 1 and isinstance(result.get(key), str):
            result[key] = choices.damaged(result[key].encode("utf-8", "replace")).decode("utf-8", "replace")
        else:
            layers = choices.pick(
                ({"p": {"format": "nvfp4", "orig_shape": [choices.size(), choices.size()]}}, *NONSENSE)
            )
            result[key] = json.dumps({"layers": layers, "_type": "NVFP4Tensor", "_data": choices.pick(NONSENSE)})
    return result


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def built(choices: Choices, checkpoint: Checkpoint) -> bytes:
    """A safetensors file of damaged tensors, under a damaged header, or with damaged bytes."""
    tensors = damage_tensors(choices, checkpoint.tensors)
    header = header_of(tensors)
    metadata = damage_metadata(choices, checkpoint.metadata)
    if metadata:
        header["__metadata__"] = metadata
    data = b"".join(data for _, _, data in tensors.values())
    text = dumped(damage_header(choices, header))
    if choices.one_in(8):
        text = choices.damaged(text)
    length = choices.number(len(text)) if choices.one_in(16) else len(text)
    whole = file_bytes(text, data, length & (2**64 - 1))
    return choices.damaged(whole) if choices.one_in(8) else whole


def safetensors(choices: Choices) -> None:
    """A checkpoint of any format, damaged on purpose, with or without a config beside it."""
    checkpoint = choices.pick(checkpoints())
    with file_of(built(choices, checkpoint), ".safetensors") as path:
        if choices.one_in(4):
            for name, text in SIDECARS.items():
                data = text.encode()
                path.with_name(name).write_bytes(choices.damaged(data) if choices.one_in(2) else data)
        exercise(path, choices)


def raw_safetensors(choices: Choices) -> None:
    """Bytes as a file."""
    with file_of(choices.rest(), ".safetensors") as path:
        exercise(path, Choices(b""))


def sharded(choices: Choices) -> None:
    """An index over two files; names and files that don't fit."""
    checkpoint = choices.pick(checkpoints())
    names = tuple(checkpoint.tensors)
    half = choices.below(len(names) + 1)
    files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    weight_map: dict[Any, Any] = {name: file for file, held in files.items() for name in held}
    odd = (
        "../a.safetensors",
        "/etc/passwd",
        "",
        ".",
        "c.safetensors",
        "a" * 5000,
        "a\0b",
        "C:\\x",
        "a/../../b",
        "sub/a",
    )
    for _ in range(choices.below(3)):
        name = choices.pick((*weight_map, "p.weight", "p.bias"))
        weight_map[name] = choices.pick((*odd, *files, *NONSENSE))
    index: Any = {"weight_map": weight_map if not choices.one_in(16) else choices.pick(NONSENSE)}
    data = dumped(index if not choices.one_in(16) else choices.pick(NONSENSE))
    with file_of(choices.damaged(data) if choices.one_in(4) else data, ".safetensors.index.json") as path:
        for file, held in files.items():
            part = Checkpoint(file, {name: checkpoint.tensors[name] for name in held}, checkpoint.metadata)
            path.with_name(file).write_bytes(built(choices, part))
        exercise(path, choices)


def gguf(choices: Choices) -> None:
    """A GGUF file with damaged types, shapes, offsets, names and bytes."""
    tensors: dict[str, GGUFTensor] = dict(gguf_tensors())
    for _ in range(choices.below(4)):
        name = choices.pick(tuple(tensors) or ("p.weight",))
        if name not in tensors:
            break
        number, shape, data = tensors[name]
        how = choices.below(5)
        if how == 0:
            tensors[name] = (choices.pick((*TYPES, choices.byte(), 2**32 - 1)), shape, data)
        elif how == 1 and shape:
            axis = choices.below(len(shape))
            sizes = [*shape[:axis], choices.number(shape[axis]) & (2**64 - 1), *shape[axis + 1 :]]
            tensors[name] = (number, sizes, data)
        elif how == 2:
            tensors[name] = (number, [choices.size() & (2**64 - 1) for _ in range(choices.below(6))], data)
        elif how == 3:
            tensors[choices.pick(("p", "e", "e[0]", "")) + choices.pick(SUFFIXES)] = tensors.pop(name)
        else:
            tensors[name] = (number, shape, choices.damaged(data))
    pairs, count = gguf_pairs()
    alignment = choices.pick((32, 32, 32, 1, 64, 16))
    if choices.one_in(4):
        pairs = choices.damaged(pairs)
    whole = gguf_bytes(tensors, pairs, choices.number(count) & (2**64 - 1) if choices.one_in(8) else count, alignment)
    with file_of(choices.damaged(whole) if choices.one_in(3) else whole, ".gguf") as path:
        exercise(path, choices)


def raw_gguf(choices: Choices) -> None:
    """Bytes behind the magic."""
    with file_of(b"GGUF\x03\0\0\0" + choices.rest(), ".gguf") as path:
        exercise(path, Choices(b""), writes=False)


def mapping(choices: Choices) -> None:
    """A mapping of NumPy arrays, whose dtypes and strides no file has."""
    arrays: dict[Any, Any] = {}
    for name, (dtype, shape, data) in damage_tensors(choices, choices.pick(checkpoints()).tensors).items():
        array: Any = np.frombuffer(data, RAW[dtype])
        if array.size == np.prod(raw_shape(dtype, tuple(shape)), dtype=object) and all(0 <= d < 2**31 for d in shape):
            array = array.reshape(raw_shape(dtype, tuple(shape)))
        if dtype == "F8_E4M3":
            array = array.view(ml_dtypes.float8_e4m3fn)
        elif dtype == "BF16":
            array = array.view(ml_dtypes.bfloat16)
        how = choices.below(12)
        if how == 0:
            array = np.zeros([choices.below(40) for _ in range(choices.below(4))], choices.pick(NUMPY_DTYPES))
        elif how == 1 and array.ndim:
            array = array[::-1]
        elif how == 2:
            array = np.asfortranarray(array)
        elif how == 3:
            array = choices.pick((0.5, 3, True, np.float64(2.0), np.float32(np.nan)))
        elif how == 4:  # a shape that costs no memory
            array = np.broadcast_to(np.uint8(0x38), [choices.pick((0, 1, 16, 2**20, 2**31)) for _ in range(2)])
            if array.size > 1 << 22:
                continue
        arrays[name] = array
    exercise(arrays, choices)


def json_text(choices: Choices) -> None:
    """The strict JSON reader against Python's own."""
    data = choices.damaged(dumped(choices.pick([header_of(c.tensors) for c in checkpoints()])))
    try:
        value = parse_json(data, "it")
    except FormatError:
        return
    assert value == json.loads(data.decode())


def floats(choices: Choices) -> None:
    """A float checkpoint into `quantize_file`: all of it is written, or nothing is."""
    checkpoint = next(c for c in checkpoints() if c.name == "floats")
    out = PLACE / f"fp4linear-fuzz-{os.getpid()}-quantized.safetensors"
    with file_of(built(choices, checkpoint), ".safetensors") as path:
        try:
            reports = []
            with refusals(str(path)):
                method = choices.pick(("max_abs", "four_over_six", "mse"))
                reports = quantize_file(path, out, method=method, force=True)
            assert out.exists() == bool(reports)
            if reports:
                assert {layer.name for layer in inspect(out).layers} >= {report.name for report in reports}
        finally:
            out.unlink(missing_ok=True)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "safetensors": guarded(safetensors),
    "raw_safetensors": guarded(raw_safetensors),
    "sharded": guarded(sharded),
    "gguf": guarded(gguf),
    "raw_gguf": guarded(raw_gguf),
    "mapping": guarded(mapping),
    "json_text": guarded(json_text),
    "floats": guarded(floats),
}
try:
    from tests.fuzz.onnx_targets import ONNX_TARGETS
except ImportError:  # onnx is not installed
    pass
else:
    TARGETS |= ONNX_TARGETS

assert max(SIZES) > 2**64
