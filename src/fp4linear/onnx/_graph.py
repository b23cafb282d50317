"""A model's main graph, indexed: who makes a value, who reads it, and which values are constants."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, TensorProto

from fp4linear.files import FormatError

from ._tensors import expect_type, round_to, to_float32

Source: TypeAlias = str | os.PathLike[str] | ModelProto
STANDARD = ("", "ai.onnx")
MAX_MODEL_BYTES = 2**31 - 1  # protobuf's limit
MAX_STEPS = 32  # nodes followed from a value to the constant behind it: a damaged model may have a cycle


def read_model(source: Source, folder: str | os.PathLike[str] | None) -> tuple[ModelProto, Path | None]:
    """The model, its external data not read, and the folder that this data must lie in."""
    if isinstance(source, ModelProto):
        return source, None if folder is None else Path(folder)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"model: got {type(source).__name__}, expected a path or an onnx.ModelProto")
    path = Path(source)
    if path.stat().st_size > MAX_MODEL_BYTES:
        raise FormatError(f"{os.fspath(path)!r}: not an ONNX model: {path.stat().st_size} bytes")
    model = ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except (DecodeError, RuntimeError) as error:
        raise FormatError(f"{os.fspath(path)!r}: not an ONNX model: {error}") from None
    return model, path.parent if folder is None else Path(folder)


class Graph:
    """Indices over a model's main graph. FormatError where a name has two makers."""

    def __init__(self, model: ModelProto, folder: Path | None) -> None:
        self.folder = folder
        self.nodes: list[NodeProto] = list(model.graph.node)
        self.outputs = {value.name for value in model.graph.output}
        self.initializers: dict[str, TensorProto] = {}
        self.makers: dict[str, NodeProto] = {}
        self.readers: dict[str, list[NodeProto]] = {}
        _check_names(model)
        for tensor in model.graph.initializer:
            if tensor.name in self.initializers:
                raise FormatError(f"model: two initialisers are named {tensor.name!r}")
            self.initializers[tensor.name] = tensor
        for node in self.nodes:
            for output in filter(None, node.output):
                if output in self.makers or output in self.initializers:
                    raise FormatError(f"model: the value {output!r} is made twice")
                self.makers[output] = node
            for name in dict.fromkeys(filter(None, node.input)):
                self.readers.setdefault(name, []).append(node)

    def tensor(self, name: str) -> TensorProto | None:
        """The tensor of an initialiser or of a Constant node, Identity nodes seen through; else None."""
        for _ in range(MAX_STEPS):
            if name in self.initializers:
                return self.initializers[name]
            node = self.makers.get(name)
            if node is None or node.domain not in STANDARD:
                return None
            if node.op_type == "Constant":
                return next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
            if node.op_type != "Identity" or not node.input:
                return None
            name = node.input[0]
        return None

    def floats(self, name: str, what: str, steps: int = MAX_STEPS) -> npt.NDArray[np.float32]:
        """A constant float value as the graph computes it: through Identity, Cast (with its rounding) and Div.

        Raises FormatError where it depends on anything else than constants.
        """
        tensor = self.tensor(name)
        if tensor is not None:
            return to_float32(tensor, self.folder)
        node = self.makers.get(name)
        if node is not None and node.domain in STANDARD and steps > 0:
            if node.op_type == "Identity" and len(node.input) == 1:
                return self.floats(node.input[0], what, steps - 1)
            if node.op_type == "Cast" and len(node.input) == 1:
                to = integer(node, "to", 0)
                if to in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
                    return round_to(self.floats(node.input[0], what, steps - 1), to)
            if node.op_type == "Div" and len(node.input) == 2:
                # How a checkpoint's divisor (compressed-tensors) becomes the factor that the nodes take.
                numerator, divisor = (self.floats(part, what, steps // 2) for part in node.input)
                if numerator.size == 1 or numerator.shape == divisor.shape:
                    with np.errstate(all="ignore"):
                        return np.asarray(numerator / divisor, np.float32)
        raise FormatError(f"{what} {name!r}: expected a constant, got {_origin(node)}")

    def constant(self, name: str, what: str, *data_types: int) -> TensorProto:
        """A constant of one of these types, not read yet. FormatError otherwise."""
        tensor = self.tensor(name)
        if tensor is None:
            raise FormatError(f"{what} {name!r}: expected a constant, got {_origin(self.makers.get(name))}")
        expect_type(tensor, what, *data_types)
        return tensor

    def followed(self, name: str) -> Iterator[tuple[str, bool, NodeProto]]:
        """Readers of a matrix, seen through Identity, Cast and Transpose: (value read, is it transposed, reader)."""
        todo, seen = [(name, False)], {name}
        while todo:
            value, transposed = todo.pop()
            for node in self.readers.get(value, []):
                through = node.domain in STANDARD and node.op_type in ("Identity", "Cast", "Transpose")
                if not through or len(node.output) != 1:
                    yield value, transposed, node
                elif node.output[0] not in seen:
                    seen.add(node.output[0])
                    permutes = node.op_type == "Transpose" and _permutation(node) in ([], [1, 0])
                    todo.append((node.output[0], transposed != permutes))


def _check_names(model: ModelProto) -> None:
    """protobuf gives strings that are not UTF-8 as bytes: no valid model has them, and nothing here expects them."""
    graph = model.graph
    for values in (graph.initializer, graph.input, graph.output, graph.value_info):
        for value in values:
            _check_text(value.name)
    for node in graph.node:
        for text in (node.op_type, node.domain, node.name, *node.input, *node.output):
            _check_text(text)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise FormatError(f"model: got the name {text!r}, expected UTF-8")


def _origin(node: NodeProto | None) -> str:
    return "an input of the model" if node is None else f"the result of {node.op_type} {node.name!r}"


def _permutation(node: NodeProto) -> list[int]:
    return next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), [])


def integer(node: NodeProto, name: str, default: int) -> int:
    """An integer attribute."""
    return next((attribute.i for attribute in node.attribute if attribute.name == name), default)


def real(node: NodeProto, name: str, default: float) -> float:
    """A float attribute."""
    return next((attribute.f for attribute in node.attribute if attribute.name == name), default)
