"""Layers into ONNX models, as nodes of com.microsoft's MatMulBlockQuantizedFp4Weight (onnxruntime 1.32's schema)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ._graph import STANDARD, Graph, Source, integer, read_model, real
from ._reading import DOMAIN, OPERATOR
from ._tensors import FLOATS, bfloat16_bits, round_to, shape, to_float32

if TYPE_CHECKING:
    from fp4linear import Fp4Linear
    from fp4linear._quantize import Method

Activations = Literal["float16", "bfloat16"]
TYPES: dict[str, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def to_node(
    layer: Fp4Linear,
    name: str,
    x: str,
    y: str,
    *,
    dtype: Activations = "float16",
    input_scale: float | None = None,
    round_bias: bool = False,
) -> tuple[NodeProto, list[TensorProto]]:
    """A MatMulBlockQuantizedFp4Weight node that computes what a layer does, and its initialisers.

    The model needs the opset import ("com.microsoft", 1).

    Args:
        layer: the layer; one with a scale2 a row can't be written, the operator holds one.
        name: of the node; the initialisers are `name`.weight, .weight_scale, .weight_scale_2, .input_scale and .bias.
        x: the value [..., K] to multiply; y: the name of the result [..., N]. Both of type dtype.
        dtype: "float16" or "bfloat16", the operator's types.
        input_scale: global scale of x for the operator's native NVFP4 path, which is opt-in there; weight-only without.
        round_bias: the operator's bias has x's type. A bias that doesn't fit it is refused, or rounded with True.

    Returns:
        (node, initialisers); weight and scales byte for byte those of `layer.canonical()`. Where the layer reads NaN
        scales as zero, they are written as zero.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: a layer that the operator can't hold.

    Example:
        >>> import numpy as np, fp4linear.onnx
        >>> layer = fp4linear.Fp4Linear(*fp4linear.quantize(np.eye(32, 64, dtype=np.float32)))
        >>> node, tensors = fp4linear.onnx.to_node(layer, "up", "x", "y", dtype="bfloat16")
        >>> node.op_type, [tensor.name for tensor in tensors]
        ('MatMulBlockQuantizedFp4Weight', ['up.weight', 'up.weight_scale', 'up.weight_scale_2'])
    """
    for argument, value in (("name", name), ("x", x), ("y", y)):
        if not isinstance(value, str):
            raise TypeError(f"{argument}: got {type(value).__name__}, expected str")
        if not value:
            raise ValueError(f"{argument}: got '', expected a name")
    tensors = _initializers(layer, name, dtype, input_scale, round_bias)
    inputs = [x, *(tensors[part].name if part in tensors else "" for part in _INPUTS)]
    while not inputs[-1]:
        inputs.pop()
    return _node(layer, name, inputs, y), list(tensors.values())


def replace(
    model: Source,
    layers: Mapping[str, Fp4Linear],
    *,
    activations: Activations | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> ModelProto:
    """A copy of a model in which NVFP4 layers take the place of MatMul and Gemm weights.

    Every MatMul and Gemm of the main graph whose second input is the named initialiser becomes a
    MatMulBlockQuantizedFp4Weight node that keeps the name, the input and the output; initialisers that nothing reads
    any more are removed. Biases stay as they are: Gemm's C becomes the node's bias where the types allow it, else an
    Add.

    Args:
        model: a path or an onnx.ModelProto; not changed.
        layers: from the name of a weight initialiser ([K, N], or [N, K] with Gemm's transB), or of one node, to a
            layer without a bias.
        activations: the operator takes float16 and bfloat16. Where the replaced weight is FLOAT, x is cast to this
            type before the node and the result back; it must be given then.
        folder: where external data lies, for a ModelProto.

    Returns:
        The new model; what it doesn't replace may still be external data beside the original.

    Raises:
        FormatError: (a ValueError) a damaged model.
        ValueError: no such weight, another shape, a Gemm with transA, alpha or beta, or what `to_node` refuses.
        TypeError: layers is no mapping.

    Example:
        >>> import numpy as np, onnx, fp4linear.onnx
        >>> from onnx import helper, numpy_helper
        >>> w = numpy_helper.from_array(np.eye(64, 32, dtype=np.float32), "up.weight")  # [K, N]
        >>> x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
        >>> node = helper.make_node("MatMul", ["x", "up.weight"], ["y"], name="up")
        >>> model = helper.make_model(helper.make_graph([node], "model", [x], [y], [w]))
        >>> layer = fp4linear.Fp4Linear(*fp4linear.quantize(np.eye(32, 64, dtype=np.float32)))  # [N, K]
        >>> small = fp4linear.onnx.replace(model, {"up.weight": layer}, activations="float16")
        >>> [node.op_type for node in small.graph.node]
        ['Cast', 'MatMulBlockQuantizedFp4Weight', 'Cast']
    """
    source, where = read_model(model, folder)
    _check_activations(activations)
    if not isinstance(layers, Mapping):
        raise TypeError(f"layers: got {type(layers).__name__}, expected a mapping from names to layers")
    result = ModelProto()
    result.CopyFrom(source)
    graph = Graph(result, where)
    planned: dict[str, tuple[str, Fp4Linear]] = {}
    for name, layer in layers.items():
        uses = _uses(graph, name)
        if not uses:
            raise ValueError(
                f"layers: got {name!r}, expected a constant weight of a MatMul or Gemm, or such a node's name"
            )
        if layer.bias is not None:
            raise ValueError(f"layers: {name!r} has a bias, expected none: the model's own bias stays")
        for node in uses:
            reason = _unfit(node)
            if reason is not None:
                raise ValueError(f"layers: {name!r}: {reason}")
            if node.output[0] in planned:
                raise ValueError(f"layers: {node.name!r} is given twice, by node and by weight")
            n, k = _matrix_shape(graph, node)
            if (layer.out_features, layer.in_features) != (n, k):
                raise ValueError(
                    f"layers: {name!r}: got a layer [{layer.out_features}, {layer.in_features}], expected [{n}, {k}]"
                )
            planned[node.output[0]] = (name, layer)
    _Rewriter(result, graph, activations).run(planned)
    return result


def quantize(
    model: Source,
    names: Iterable[str] | None = None,
    *,
    method: Method = "max_abs",
    activations: Activations | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> ModelProto:
    """A copy of a model with the float weights of MatMul and Gemm nodes quantised to NVFP4.

    Args:
        model, activations, folder: as for `replace`.
        names: weight initialisers or nodes; None for every constant matrix with an even K whose nodes can be replaced.
        method: as for `fp4linear.quantize`.

    Returns:
        The new model, as of `replace`.

    Raises:
        FormatError, ValueError, TypeError: as `replace` does, and as `fp4linear.quantize` for values that are not
            finite.

    Example:
        >>> import numpy as np, onnx, fp4linear.onnx
        >>> from onnx import helper, numpy_helper
        >>> w = numpy_helper.from_array(np.eye(64, 32, dtype=np.float32), "up.weight")  # [K, N]
        >>> x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
        >>> node = helper.make_node("MatMul", ["x", "up.weight"], ["y"], name="up")
        >>> model = helper.make_model(helper.make_graph([node], "model", [x], [y], [w]))
        >>> small = fp4linear.onnx.quantize(model, activations="bfloat16")
        >>> [node.op_type for node in small.graph.node], small.ByteSize() < model.ByteSize() / 4
        (['Cast', 'MatMulBlockQuantizedFp4Weight', 'Cast'], True)
    """
    from fp4linear import Fp4Linear
    from fp4linear import quantize as quantize_weight

    if isinstance(names, str):
        raise TypeError("names: got str, expected several names or None")
    source, where = read_model(model, folder)
    _check_activations(activations)
    graph = Graph(source, where)
    if names is None:
        names = dict.fromkeys(node.input[1] for node in graph.nodes if _is_eligible(graph, node))
    layers: dict[str, Fp4Linear] = {}
    for name in names:
        uses = _uses(graph, name)
        if not uses:
            raise ValueError(
                f"names: got {name!r}, expected a constant weight of a MatMul or Gemm, or such a node's name"
            )
        orientations = {_is_transposed(node) for node in uses}
        if len(orientations) != 1:
            raise ValueError(f"names: {name!r} is read both as [N, K] and as [K, N]; name its nodes")
        tensor = graph.tensor(uses[0].input[1])
        assert tensor is not None
        weight = to_float32(tensor, where)
        try:
            layers[name] = Fp4Linear(*quantize_weight(weight if orientations.pop() else weight.T, method=method))
        except ValueError as error:
            raise ValueError(f"names: {name!r}: {error}") from None
    return replace(source, layers, activations=activations, folder=where)


_INPUTS = ("weight", "weight_scale", "weight_scale_2", "input_scale", "bias")  # in the schema's order, behind A


def _initializers(
    layer: Fp4Linear, prefix: str, dtype: str, input_scale: float | None, round_bias: bool
) -> dict[str, TensorProto]:
    if dtype not in TYPES:
        raise ValueError(f"dtype: got {dtype!r}, expected 'float16' or 'bfloat16'")
    b, scales, scale2 = layer.canonical()
    if scale2.size != 1:
        raise ValueError(f"layer: scale2 has {scale2.size} elements, expected 1: {OPERATOR} holds one factor")
    nan = (scales & 0x7F) == 0x7F
    if nan.any() and not np.isnan(layer.dequantize()).any():
        scales = np.where(nan, np.uint8(0), scales)
    tensors = {
        "weight": _tensor(TensorProto.UINT8, b.shape, b),
        "weight_scale": _tensor(TensorProto.UINT8, scales.shape, scales),
        "weight_scale_2": _tensor(TensorProto.FLOAT, (), scale2.astype("<f4")),
    }
    if input_scale is not None:
        value = np.float32(input_scale)
        if not np.isfinite(value) or value <= 0:
            raise ValueError(f"input_scale: got {input_scale}, expected a finite number > 0")
        tensors["input_scale"] = _tensor(TensorProto.FLOAT, (), np.asarray(value, "<f4"))
    bias = layer.bias
    if bias is not None:
        rounded = round_to(bias, TYPES[dtype])
        if not round_bias and not np.array_equal(rounded, bias, equal_nan=True):
            raise ValueError(
                f"layer: its bias does not fit {dtype}, the type that the operator wants; pass round_bias=True"
            )
        half = bfloat16_bits(bias).astype("<u2") if dtype == "bfloat16" else rounded.astype("<f2")
        tensors["bias"] = _tensor(TYPES[dtype], bias.shape, half)
    for part, tensor in tensors.items():
        tensor.name = f"{prefix}.{part}"
    return tensors


def _tensor(data_type: int, dims: tuple[int, ...], values: npt.NDArray[Any]) -> TensorProto:
    return TensorProto(data_type=data_type, dims=dims, raw_data=np.ascontiguousarray(values).tobytes())


def _node(layer: Fp4Linear, name: str, inputs: list[str], y: str) -> NodeProto:
    return helper.make_node(OPERATOR, inputs, [y], name=name, domain=DOMAIN, block_size=layer.block_size)


def _check_activations(activations: str | None) -> None:
    if activations is not None and activations not in TYPES:
        raise ValueError(f"activations: got {activations!r}, expected 'float16', 'bfloat16' or None")


def _uses(graph: Graph, name: str) -> list[NodeProto]:
    """MatMul and Gemm nodes of this name, or with this constant weight."""
    readers = [node for node in graph.readers.get(name, []) if list(node.input[1:2]) == [name]]
    named = [node for node in readers or graph.nodes if readers or node.name == name]
    return [node for node in named if _weight(graph, node) is not None]


def _weight(graph: Graph, node: NodeProto) -> TensorProto | None:
    if node.op_type not in ("MatMul", "Gemm") or node.domain not in STANDARD:
        return None
    if len(node.input) < 2 or len(node.output) != 1 or not node.output[0]:
        return None
    tensor = graph.tensor(node.input[1])
    return tensor if tensor is not None and tensor.data_type in FLOATS and len(tensor.dims) == 2 else None


def _is_transposed(node: NodeProto) -> bool:
    """Whether the weight is [N, K]."""
    return node.op_type == "Gemm" and bool(integer(node, "transB", 0))


def _matrix_shape(graph: Graph, node: NodeProto) -> tuple[int, int]:
    tensor = _weight(graph, node)
    assert tensor is not None
    rows, columns = shape(tensor)
    return (rows, columns) if _is_transposed(node) else (columns, rows)


def _unfit(node: NodeProto) -> str | None:
    """Why a node can't be replaced."""
    if node.op_type == "Gemm":
        if integer(node, "transA", 0):
            return f"Gemm {node.name!r} has transA = 1, expected 0"
        for attribute in ("alpha", "beta"):
            value = real(node, attribute, 1.0)
            if value != 1.0:
                return f"Gemm {node.name!r} has {attribute} = {value}, expected 1"
    return None


def _is_eligible(graph: Graph, node: NodeProto) -> bool:
    if _weight(graph, node) is None or _unfit(node) is not None:
        return False
    n, k = _matrix_shape(graph, node)
    # One weight read in both orientations is two layers; that is left to those who name them.
    alike = {_is_transposed(other) for other in _uses(graph, node.input[1])}
    return n > 0 and k > 0 and k % 2 == 0 and len(alike) == 1


class _Rewriter:
    """Puts nodes in the place of others in one pass over the graph, in its order."""

    def __init__(self, model: ModelProto, graph: Graph, activations: Activations | None) -> None:
        self.model = model
        self.graph = graph
        self.activations = activations
        self.names = set(graph.initializers) | set(graph.makers) | {value.name for value in model.graph.input}
        self.names |= {node.name for node in graph.nodes}
        self.nodes: list[NodeProto] = []
        self.casts: dict[str, str] = {}
        self.weights: dict[int, dict[str, str]] = {}  # id of a layer: part to initialiser

    def run(self, planned: Mapping[str, tuple[str, Fp4Linear]]) -> None:
        touched = {name for value in planned for name in self.graph.makers[value].input}
        for node in self.graph.nodes:
            if node.output and node.output[0] in planned:
                self._replace(node, *planned[node.output[0]])
            else:
                self.nodes.append(node)
        proto = self.model.graph
        nodes = [NodeProto.FromString(node.SerializeToString()) for node in self.nodes]
        del proto.node[:]
        proto.node.extend(nodes)
        self._drop_unread(proto, touched)
        if planned and not any(entry.domain == DOMAIN for entry in self.model.opset_import):
            self.model.opset_import.append(helper.make_opsetid(DOMAIN, 1))

    def _replace(self, node: NodeProto, key: str, layer: Fp4Linear) -> None:
        weight = _weight(self.graph, node)
        assert weight is not None
        casts = weight.data_type == TensorProto.FLOAT
        if casts and self.activations is None:
            raise ValueError(
                f"activations: got None, expected 'float16' or 'bfloat16': {key!r} is FLOAT, {OPERATOR} takes 16 bits"
            )
        dtype = self.activations if casts else "float16" if weight.data_type == TensorProto.FLOAT16 else "bfloat16"
        assert dtype is not None
        parts = self._initializers(layer, weight.name or key, dtype)
        c = node.input[2] if len(node.input) > 2 else ""
        bias = c if c and not casts and self._is_vector(c, layer.out_features) else ""
        y = node.output[0]
        made = self._fresh(y + "_nvfp4") if casts or (c and not bias) else y
        x = self._cast(node.input[0], dtype) if casts else node.input[0]
        inputs = [x, *parts] + (["", bias] if bias else [])
        self.nodes.append(_node(layer, node.name, inputs, made))
        if casts:
            back = self._fresh(y + "_cast") if c else y
            self.nodes.append(helper.make_node("Cast", [made], [back], to=TensorProto.FLOAT))
            made = back
        if c and not bias:
            self.nodes.append(helper.make_node("Add", [made, c], [y]))

    def _initializers(self, layer: Fp4Linear, weight: str, dtype: str) -> list[str]:
        if id(layer) not in self.weights:
            prefix = self._fresh(weight.removesuffix(".weight") + ".nvfp4")
            tensors = _initializers(layer, prefix, dtype, None, False)
            for tensor in tensors.values():
                tensor.name = self._fresh(tensor.name)
            self.model.graph.initializer.extend(tensors.values())
            self.weights[id(layer)] = {part: tensor.name for part, tensor in tensors.items()}
        return [self.weights[id(layer)][part] for part in _INPUTS[:3]]

    def _cast(self, x: str, dtype: str) -> str:
        if x not in self.casts:
            self.casts[x] = self._fresh(f"{x}_{dtype}")
            self.nodes.append(helper.make_node("Cast", [x], [self.casts[x]], to=TYPES[dtype]))
        return self.casts[x]

    def _is_vector(self, name: str, n: int) -> bool:
        tensor = self.graph.tensor(name)
        return tensor is not None and tuple(tensor.dims) == (n,)

    def _fresh(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _drop_unread(self, proto: GraphProto, candidates: set[str]) -> None:
        """Removes initialisers that only the replaced nodes read; an output or a subgraph may read them too."""
        read = {name for node in proto.node for name in _read_names(node)} | self.graph.outputs
        for name in candidates - read:
            for values in (proto.initializer, proto.input, proto.value_info):
                if name in self.graph.initializers:
                    for index in reversed([i for i, value in enumerate(values) if value.name == name]):
                        del values[index]


def _read_names(node: NodeProto) -> set[str]:
    """The values that a node reads, those of its subgraphs included."""
    names = set(node.input)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                names |= _read_names(inner)
            names |= {value.name for value in graph.output}
    return names
