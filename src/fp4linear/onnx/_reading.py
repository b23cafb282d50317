"""Layers from ONNX models."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto

from fp4linear.files import FormatError

from ._graph import STANDARD, Graph, Source, integer, read_model, real
from ._tensors import FLOATS, raw_bytes, shape, to_float32, type_name

if TYPE_CHECKING:
    from fp4linear import Fp4Linear

OPERATOR = "MatMulBlockQuantizedFp4Weight"
DOMAIN = "com.microsoft"
DEQUANTIZE_DOMAINS = (*STANDARD, "trt")  # TensorRT's exporters put the same operator in their own domain
WEIGHT_SUFFIXES = ("_f4", "_quantized", ".weight", ".B")  # what a caller may leave on a weight's name


@dataclass(frozen=True)
class LayerInfo:
    """An NVFP4 layer of a model.

    name: what `load` takes (the node's or the weight's name); format: the operator that holds the weight; weight: its
    initialiser's name; bias: the value's name, or None; shape: (out_features, in_features), None where the layer can't
    be loaded; block_size: values of K that share a scale; problem: why it can't be loaded, or None.
    """

    name: str
    format: str
    weight: str
    bias: str | None
    shape: tuple[int, int] | None
    block_size: int
    problem: str | None


@dataclass
class _Candidate:
    node: NodeProto  # that holds the weight
    use: NodeProto | None  # the MatMul or Gemm that multiplies by it; the node itself where it does both
    contracted: int | None  # the axis of the weight that the use sums over
    bias: str | None
    name: str = ""


@dataclass(frozen=True)
class _Parts:
    """A layer's tensors, checked by type and shape, not read."""

    n: int
    k: int
    block_size: int
    weight: TensorProto
    scales: TensorProto
    scale2: str
    row_axis: int  # of weight and scales
    scale2_axis: int | None  # the axis of scales that a scale2 of more than one element belongs to


def layers(model: Source, *, folder: str | os.PathLike[str] | None = None) -> list[LayerInfo]:
    """The NVFP4 layers of a model's main graph, without reading their weights.

    Args:
        model: a path, or an onnx.ModelProto.
        folder: where external data lies, for a ModelProto.

    Raises:
        FormatError: (a ValueError) a damaged model.
        OSError: a file that can't be read.

    Example:
        >>> import numpy as np, onnx, fp4linear.onnx
        >>> from onnx import helper, numpy_helper
        >>> w = numpy_helper.from_array(np.eye(64, 32, dtype=np.float32), "up.weight")  # [K, N]
        >>> x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
        >>> node = helper.make_node("MatMul", ["x", "up.weight"], ["y"], name="up")
        >>> model = helper.make_model(helper.make_graph([node], "model", [x], [y], [w]))
        >>> small = fp4linear.onnx.quantize(model, activations="float16")
        >>> [(info.name, info.shape, info.problem) for info in fp4linear.onnx.layers(small)]
        [('up', (32, 64), None)]
    """
    proto, where = read_model(model, folder)
    graph = Graph(proto, where)
    return [_info(graph, candidate) for candidate in _candidates(graph)]


def load(
    model: Source,
    name: str | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
    nan_scales: Literal["error", "zero", "propagate"] = "error",
    bias: npt.ArrayLike | Literal["auto"] | None = "auto",
    device: str | None = None,
    path: str = "auto",
    isa: str | None = None,
    threads: int | None = None,
    batch_invariant: bool = False,
) -> Fp4Linear:
    """A layer from an ONNX model.

    Read are com.microsoft's MatMulBlockQuantizedFp4Weight (onnxruntime 1.32's schema) and a FLOAT4E2M1 weight behind
    DequantizeLinear(DequantizeLinear(E4M3 scales, global scale)), as ModelOpt exports it. The blocked axis of such a
    weight is in_features, whether the graph keeps it [N, K] or [K, N]. input_scale is not applied: the layer is
    weight-only. The scales are combined exactly, without the roundings that the chain's own types ask for.

    Args:
        model: a path, or an onnx.ModelProto.
        name: a layer's name as `layers` gives it, or the name of its node, of its MatMul or Gemm, or of its weight;
            "X" finds "X.weight" and "X.weight_f4" too. None where the model holds one layer.
        folder: where external data lies, for a ModelProto; files outside of it are not read.
        nan_scales: what to do with NaN scale bytes, as for `Fp4Linear`.
        bias: "auto" takes the node's bias input, Gemm's C, or the constant [N] that an Add puts on a MatMul's only
            result; None is no bias; an array of [out_features] replaces it.
        device, path, isa, threads, batch_invariant: as for `Fp4Linear`.

    Raises:
        FormatError: (a ValueError) a damaged model, inconsistent tensors, or a weight that is no NVFP4 layer.
        ValueError: no such layer, more than one, or a value that `Fp4Linear` refuses.
        TypeError: an argument of a wrong type.
        OSError: a file that can't be read.

    Example:
        >>> import numpy as np, onnx, fp4linear.onnx
        >>> from onnx import helper, numpy_helper
        >>> w = numpy_helper.from_array(np.eye(64, 32, dtype=np.float32), "up.weight")  # [K, N]
        >>> x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in "xy")
        >>> node = helper.make_node("MatMul", ["x", "up.weight"], ["y"], name="up")
        >>> model = helper.make_model(helper.make_graph([node], "model", [x], [y], [w]))
        >>> layer = fp4linear.onnx.load(fp4linear.onnx.quantize(model, activations="float16"), "up")
        >>> layer.out_features, layer.in_features
        (32, 64)
    """
    from fp4linear import Fp4Linear

    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: got {type(name).__name__}, expected str or None")
    proto, where = read_model(model, folder)
    graph = Graph(proto, where)
    candidate = _choose(_candidates(graph), name, bias_matters=isinstance(bias, str))
    parts = _parts(graph, candidate)
    if isinstance(bias, str):
        if bias != "auto":
            raise ValueError(f"bias: got {bias!r}, expected 'auto', None or an array")
        bias = None if candidate.bias is None else _bias(graph, candidate, parts.n)
    b, scales = _arrays(graph, parts)
    return Fp4Linear(
        b,
        scales,
        _scale2(graph, parts),
        bias,
        block_size=parts.block_size,
        device=device,
        nan_scales=nan_scales,
        path=path,
        isa=isa,
        threads=threads,
        batch_invariant=batch_invariant,
    )


def is_operator(node: NodeProto) -> bool:
    """Whether a node is MatMulBlockQuantizedFp4Weight."""
    return bool(node.op_type == OPERATOR and node.domain == DOMAIN)


def _candidates(graph: Graph) -> list[_Candidate]:
    found: list[_Candidate] = []
    for node in graph.nodes:
        if not node.output:
            continue  # it makes nothing, so nothing can read it
        if is_operator(node):
            bias = _optional_input(node, 5)
            candidate = _Candidate(node, node, None, bias or _added_bias(graph, node))
            candidate.name = node.name or _optional_input(node, 1) or node.output[0]
            found.append(candidate)
        elif _is_weight(graph, node):
            uses = _uses(graph, node)
            for candidate in uses:
                # A shared weight is one layer a use, and only the uses can be told apart.
                use = candidate.use
                candidate.name = (
                    use.name if use is not None and len(uses) > 1 and use.name else _weight_name(graph, node)
                )
            found += uses
    return found


def _is_weight(graph: Graph, node: NodeProto) -> bool:
    """Whether a node dequantises a constant FLOAT4E2M1 matrix."""
    if node.op_type != "DequantizeLinear" or node.domain not in DEQUANTIZE_DOMAINS or len(node.input) < 2:
        return False
    tensor = graph.tensor(node.input[0])
    return bool(tensor is not None and tensor.data_type == TensorProto.FLOAT4E2M1)


def _weight_name(graph: Graph, node: NodeProto) -> str:
    index = 1 if is_operator(node) else 0
    tensor = graph.tensor(node.input[index]) if len(node.input) > index else None
    return (tensor.name if tensor is not None else "") or (node.input[index] if len(node.input) > index else "")


def _uses(graph: Graph, node: NodeProto) -> list[_Candidate]:
    found = []
    for value, transposed, reader in graph.followed(node.output[0]):
        if reader.domain not in STANDARD or list(reader.input[1:2]) != [value] or not reader.output:
            continue
        if reader.op_type == "MatMul":
            found.append(_Candidate(node, reader, int(transposed), _added_bias(graph, reader)))
        elif reader.op_type == "Gemm":
            contracted = int(transposed != bool(integer(reader, "transB", 0)))
            bias = _optional_input(reader, 2) if real(reader, "beta", 1.0) else None
            found.append(_Candidate(node, reader, contracted, bias))
    return found or [_Candidate(node, None, None, None)]


def _optional_input(node: NodeProto, index: int) -> str | None:
    return (str(node.input[index]) or None) if len(node.input) > index else None


def _added_bias(graph: Graph, node: NodeProto) -> str | None:
    """The constant vector that an Add puts on a node's result, where nothing else reads this result."""
    readers = graph.readers.get(node.output[0], [])
    if len(readers) != 1 or node.output[0] in graph.outputs:
        return None
    add = readers[0]
    if add.op_type != "Add" or add.domain not in STANDARD or len(add.input) != 2:
        return None
    other = add.input[1] if add.input[0] == node.output[0] else add.input[0]
    tensor = graph.tensor(other)
    if tensor is None or tensor.data_type not in FLOATS or len(tensor.dims) != 1:
        return None
    return str(other)


def _choose(candidates: list[_Candidate], name: str | None, *, bias_matters: bool) -> _Candidate:
    names = [candidate.name for candidate in candidates]
    shown = ", ".join(map(repr, names[:8])) + (", …" if len(names) > 8 else "")
    if name is None:
        if len(candidates) != 1:
            raise ValueError(
                f"name: got None, expected one of the model's {len(names)} NVFP4 layers: {shown or 'none'}"
            )
        return candidates[0]
    exact = [candidate for candidate in candidates if candidate.name == name]
    found = exact or [candidate for candidate in candidates if name in _aliases(candidate)]
    if not found:
        close = difflib.get_close_matches(name, names, 3) or names[:8]
        raise ValueError(f"name: got {name!r}, expected one of the model's NVFP4 layers: {', '.join(close) or 'none'}")
    first = found[0]
    same = all(other.node is first.node and (other.bias == first.bias or not bias_matters) for other in found)
    if len(found) > 1 and not same:
        uses = ", ".join(repr(other.use.name if other.use is not None else other.node.name) for other in found[:8])
        raise ValueError(f"name: {name!r} is {len(found)} layers, expected the name of one: {uses}")
    return first


def _aliases(candidate: _Candidate) -> set[str]:
    nodes = [candidate.node] if candidate.use is None else [candidate.node, candidate.use]
    names = {node.name for node in nodes}
    weight = candidate.node.input[1 if is_operator(candidate.node) else 0] if candidate.node.input else ""
    names.add(weight)
    for suffix in WEIGHT_SUFFIXES:  # in order: X.weight_f4 -> X.weight -> X
        weight = weight.removesuffix(suffix)
        names.add(weight)
    return names - {""}


def _info(graph: Graph, candidate: _Candidate) -> LayerInfo:
    parts, problem = None, None
    try:
        parts = _parts(graph, candidate)
    except FormatError as error:
        problem = str(error)
    return LayerInfo(
        name=candidate.name,
        format=candidate.node.op_type,
        weight=_weight_name(graph, candidate.node),
        bias=candidate.bias,
        shape=None if parts is None else (parts.n, parts.k),
        block_size=integer(candidate.node, "block_size", 16 if is_operator(candidate.node) else 0),
        problem=problem,
    )


def _parts(graph: Graph, candidate: _Candidate) -> _Parts:
    return _operator_parts(graph, candidate) if is_operator(candidate.node) else _chain_parts(graph, candidate)


def _operator_parts(graph: Graph, candidate: _Candidate) -> _Parts:
    node = candidate.node
    where = f"{OPERATOR} {candidate.name!r}"
    if not 4 <= len(node.input) <= 6 or not all(node.input[1:4]):
        raise FormatError(f"{where}: got {len(node.input)} inputs, expected A, B, weight_scale, weight_scale_2, and at "
                          "most input_scale and bias")  # fmt: skip
    block_size = integer(node, "block_size", 16)
    if block_size < 1:
        raise FormatError(f"{where}: got block_size {block_size}, expected a number >= 1")
    weight = graph.constant(node.input[1], f"{where}: B", TensorProto.UINT8)
    scales = graph.constant(node.input[2], f"{where}: weight_scale", TensorProto.UINT8)
    if len(shape(weight)) != 2:
        raise FormatError(f"{where}: B {weight.name!r}: got shape {list(weight.dims)}, expected [N, K/2]")
    n, k = weight.dims[0], 2 * weight.dims[1]
    _expect_elements(n, k, where)
    # Drafts of the operator had N and K as attributes; the schema derives them from B.
    for attribute, value in (("N", n), ("K", k)):
        if integer(node, attribute, value) != value:
            raise FormatError(f"{where}: got {attribute} = {integer(node, attribute, value)}, expected {value} by B")
    _expect_shape(scales, f"{where}: weight_scale", (n, -(-k // block_size)))
    input_scale = _optional_input(node, 4)
    if input_scale is not None:
        tensor = graph.tensor(input_scale)
        if tensor is not None and np.prod(shape(tensor), dtype=object) != 1:
            raise FormatError(f"{where}: input_scale {input_scale!r}: got {list(tensor.dims)}, expected one element")
    return _Parts(n, k, block_size, weight, scales, node.input[3], 0, None)


def _chain_parts(graph: Graph, candidate: _Candidate) -> _Parts:
    node = candidate.node
    where = f"DequantizeLinear of {_weight_name(graph, node)!r}"
    weight = graph.constant(node.input[0], where, TensorProto.FLOAT4E2M1)
    if len(shape(weight)) != 2:
        raise FormatError(f"{where}: got shape {list(weight.dims)}, expected a matrix")
    block_size = integer(node, "block_size", 0)
    if block_size < 1:
        raise FormatError(f"{where}: got block_size {block_size}, expected blocks, of 16 in NVFP4")
    axis = integer(node, "axis", 1)
    if axis not in (-2, -1, 0, 1):
        raise FormatError(f"{where}: got axis {axis}, expected -2 .. 1")
    axis %= 2
    use = candidate.use
    if use is not None and candidate.contracted != axis:
        raise FormatError(
            f"{where}: blocks run along axis {axis}, but {use.op_type} {use.name!r} sums over axis "
            f"{candidate.contracted}: not an NVFP4 linear layer"
        )
    if use is not None and use.op_type == "Gemm" and real(use, "alpha", 1.0) != 1.0:
        raise FormatError(f"{where}: got alpha {real(use, 'alpha', 1.0)} of Gemm {use.name!r}, expected 1")
    k, n = weight.dims[axis], weight.dims[1 - axis]
    _expect_elements(n, k, where)
    if k % 2:
        raise FormatError(f"{where}: got in_features {k}, expected an even number (two codes share a byte)")
    _no_zero_point(graph, node, where)
    maker = graph.makers.get(node.input[1])
    if maker is None or maker.op_type != "DequantizeLinear" or maker.domain not in DEQUANTIZE_DOMAINS:
        raise FormatError(
            f"{where}: {_scale_kind(graph, node.input[1])}, expected DequantizeLinear(E4M3 scales, global)"
        )
    if len(maker.input) < 2 or integer(maker, "block_size", 0):
        raise FormatError(
            f"{where}: its scales' DequantizeLinear {maker.name!r} must have a global scale and no blocks"
        )
    _no_zero_point(graph, maker, where)
    scales = graph.constant(maker.input[0], f"{where}: scales", TensorProto.FLOAT8E4M3FN)
    blocks = -(-k // block_size)
    _expect_shape(scales, f"{where}: scales", (n, blocks) if axis else (blocks, n))
    scale_axis = integer(maker, "axis", 1)
    return _Parts(n, k, block_size, weight, scales, maker.input[1], 1 - axis, scale_axis % 2)


def _expect_elements(n: int, k: int, where: str) -> None:
    # An empty matrix has no data that would bound its other dimension.
    if n < 1 or k < 1:
        raise FormatError(f"{where}: got out_features {n} and in_features {k}, expected at least 1")


def _scale_kind(graph: Graph, name: str) -> str:
    tensor = graph.tensor(name)
    if tensor is None:
        return f"its scales {name!r} are not a constant"
    if tensor.data_type == TensorProto.FLOAT8E8M0:
        return f"its scales {name!r} are FLOAT8E8M0, which is MXFP4 and not NVFP4"
    return f"its scales {name!r} are one level of {type_name(tensor.data_type)}"


def _no_zero_point(graph: Graph, node: NodeProto, where: str) -> None:
    name = _optional_input(node, 2)
    if name is None:
        return
    tensor = graph.constant(name, f"{where}: zero point", TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN)
    if raw_bytes(tensor, graph.folder).any():
        raise FormatError(f"{where}: zero point {name!r} is not zero")


def _expect_shape(tensor: TensorProto, what: str, expected: tuple[int, ...]) -> None:
    if shape(tensor) != expected:
        raise FormatError(f"{what} {tensor.name!r}: got shape {list(tensor.dims)}, expected {list(expected)}")


def _arrays(graph: Graph, parts: _Parts) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """b [N, K/2] and scales [N, ceil(K/block_size)]."""
    packed = raw_bytes(parts.weight, graph.folder)
    scales = raw_bytes(parts.scales, graph.folder).reshape(shape(parts.scales))
    if parts.row_axis == 0:
        return packed.reshape(parts.n, parts.k // 2), scales
    codes = np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(-1)[: parts.n * parts.k]
    codes = codes.reshape(parts.k, parts.n).T
    return codes[:, 0::2] | codes[:, 1::2] << 4, np.ascontiguousarray(scales.T)


def _scale2(graph: Graph, parts: _Parts) -> npt.NDArray[np.float32]:
    """0-d, or [N] where the graph has one a row."""
    factors = graph.floats(parts.scale2, "global scale")
    if factors.size == 1:
        factors = factors.reshape(())
    elif parts.scale2_axis != parts.row_axis or factors.shape != (parts.n,):
        rows = "" if parts.scale2_axis is None else f" or [{parts.n}] along axis {parts.row_axis}"
        along = "" if parts.scale2_axis is None else f" along axis {parts.scale2_axis}"
        raise FormatError(
            f"global scale {parts.scale2!r}: got shape {list(factors.shape)}{along}, expected one element{rows}"
        )
    if not np.isfinite(factors).all():
        raise FormatError(
            f"global scale {parts.scale2!r}: got {factors.reshape(-1)[:4].tolist()}, expected finite values"
        )
    return factors


def _bias(graph: Graph, candidate: _Candidate, n: int) -> npt.NDArray[np.float32]:
    use, name = candidate.use, candidate.bias
    assert name is not None
    what = f"bias {name!r} of {candidate.name!r}"
    if use is not None and use.op_type == "Gemm" and real(use, "beta", 1.0) != 1.0:
        raise FormatError(f"{what}: Gemm's beta is {real(use, 'beta', 1.0)}, expected 1; pass bias=")
    tensor = graph.constant(name, f"{what}:", *FLOATS)
    if shape(tensor) not in ((n,), (1, n)):
        raise FormatError(f"{what}: got shape {list(tensor.dims)}, expected [{n}]; pass bias=")
    return to_float32(tensor, graph.folder).reshape(n)
