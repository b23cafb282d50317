"""The fuzz targets of the ONNX bridge: a model's protobuf taken apart, changed and put together."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import numpy as np
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, helper

import fp4linear.onnx as bridge
from tests.fuzz.choices import Choices
from tests.fuzz.onnx_seeds import models
from tests.fuzz.oracle import PLACE, file_of, guarded, refusals

TEXTS = ("", "x", "y", "w", "fc.weight", "fc.weight_f4", "s", "é", "a" * 300, "fc")
OPERATORS = ("MatMul", "Gemm", "Identity", "Cast", "Transpose", "Constant", "Div", "DequantizeLinear", "Add", "If")
LOCATIONS = ("data.bin", "../data.bin", "/etc/passwd", "", ".", "a" * 5000, "sub\\data.bin", "C:data.bin", "data.bin/x")


@cache
def sources() -> tuple[bytes, ...]:
    return tuple(model.SerializeToString() for model in models())


def damage_tensor(choices: Choices, tensor: TensorProto) -> None:
    how = choices.below(9)
    if how == 0:
        tensor.data_type = choices.pick((*TensorProto.DataType.values(), 99, -1))
    elif how == 1 and tensor.dims:
        axis = choices.below(len(tensor.dims))
        tensor.dims[axis] = (choices.number(tensor.dims[axis]) + 2**63) % 2**64 - 2**63
    elif how == 2:
        del tensor.dims[:]
        tensor.dims.extend((choices.size() + 2**63) % 2**64 - 2**63 for _ in range(choices.below(5)))
    elif how == 3:
        tensor.raw_data = choices.damaged(tensor.raw_data)
    elif how == 4:
        tensor.ClearField("raw_data")
        tensor.int32_data.extend(choices.pick((0, 1, -1, 255, 256, -128, 2**31 - 1)) for _ in range(choices.below(300)))
        tensor.float_data.extend(choices.pick((0.0, 1.0, float("nan"), float("inf"))) for _ in range(choices.below(20)))
    elif how == 5:
        tensor.name = choices.pick(TEXTS)
    elif how == 6:
        tensor.segment.begin = choices.below(3)
    else:
        (PLACE / f"fp4linear-fuzz-{os.getpid()}").mkdir(exist_ok=True)
        (PLACE / f"fp4linear-fuzz-{os.getpid()}" / "data.bin").write_bytes(bytes(16) + tensor.raw_data)
        tensor.data_location = TensorProto.EXTERNAL
        entries = {"location": "data.bin", "offset": "16", "length": str(len(tensor.raw_data))}
        if choices.one_in(2):
            entries[choices.pick(tuple(entries))] = choices.pick((*LOCATIONS, str(choices.size()), "1e3", "-1", "0x10"))
        if choices.one_in(4):
            del entries[choices.pick(tuple(entries))]
        tensor.ClearField("raw_data")
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)


def damage_node(choices: Choices, model: ModelProto) -> None:
    graph = model.graph
    if not graph.node:
        return
    node = graph.node[choices.below(len(graph.node))]
    how = choices.below(8)
    if how == 0:
        node.op_type = choices.pick(OPERATORS)
    elif how == 1 and node.input:
        node.input[choices.below(len(node.input))] = choices.pick((*TEXTS, *graph.node[0].output))
    elif how == 2 and node.input:
        del node.input[choices.below(len(node.input))]
    elif how == 3:
        del node.output[:]
        node.output.extend(choices.pick(TEXTS) for _ in range(choices.below(3)))
    elif how == 4 and node.attribute:
        attribute = node.attribute[choices.below(len(node.attribute))]
        attribute.i = (choices.size() + 2**63) % 2**64 - 2**63
        attribute.f = choices.pick((0.0, 1.0, float("nan"), 2.0))
        attribute.ints.extend([choices.below(3)] * choices.below(3))
    elif how == 5:
        name = choices.pick(
            ("block_size", "axis", "transB", "transA", "alpha", "beta", "perm", "to", "N", "K", "value")
        )
        node.attribute.append(helper.make_attribute(name, choices.pick((0, 1, 16, 32, -1, 2**62, 1.0, [1, 0], [0]))))
    elif how == 6:
        node.domain = choices.pick(("", "ai.onnx", "trt", "com.microsoft", "é"))
    else:
        graph.node.append(node)


def exercise_model(source: object, choices: Choices, shown: str) -> None:
    names: list[str | None] = [None]
    with refusals(shown):
        found = bridge.layers(source)  # type: ignore[arg-type]
        names += [info.name for info in found]
        assert all(isinstance(info.name, str) for info in found)
    loaded = {}
    for name in names[:6]:
        with refusals(shown):
            layer = bridge.load(source, name, nan_scales=choices.pick(("error", "zero", "propagate")))  # type: ignore[arg-type]
            y = layer.forward(np.ones((2, layer.in_features), np.float16))
            assert y.shape == (2, layer.out_features)
            loaded[name] = layer
    with refusals(shown):
        bridge.layers(bridge.quantize(source, activations=choices.pick(("float16", "bfloat16", None))))  # type: ignore[arg-type]
    for layer in list(loaded.values())[:1]:
        with refusals(shown):
            bridge.replace(source, {choices.pick(("w", "fc.weight", "mm")): layer}, activations="float16")  # type: ignore[arg-type]


def onnx(choices: Choices) -> None:
    """A model with lying tensors, nodes and external data."""
    model = ModelProto.FromString(choices.pick(sources()))
    for _ in range(1 + choices.below(4)):
        if choices.one_in(2) and model.graph.initializer:
            damage_tensor(choices, model.graph.initializer[choices.below(len(model.graph.initializer))])
        else:
            damage_node(choices, model)
    data = model.SerializeToString()
    with file_of(choices.damaged(data) if choices.one_in(8) else data, ".onnx") as path:
        exercise_model(path, choices, repr(str(path)))


def raw_onnx(choices: Choices) -> None:
    """Damaged protobuf bytes."""
    data = choices.damaged(choices.pick(sources()))
    with file_of(data, ".onnx") as path:
        exercise_model(path, choices, repr(str(path)))
    try:
        model = ModelProto.FromString(data)
    except (DecodeError, RuntimeError):
        return
    exercise_model(model, choices, "model")


ONNX_TARGETS: dict[str, Callable[[bytes], None]] = {"onnx": guarded(onnx), "raw_onnx": guarded(raw_onnx)}
