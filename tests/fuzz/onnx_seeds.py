"""Valid models: the operator with every input, ModelOpt's chains, and float weights to quantise."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, helper

from tests.checkpoints import weight_bytes

OPSETS = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("trt", 1)]


def raw(name: str, data_type: int, dims: tuple[int, ...], data: bytes) -> TensorProto:
    return helper.make_tensor(name, data_type, dims, data, raw=True)


def model_of(nodes: list, tensors: list[TensorProto]) -> ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, None) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], tensors)
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=11)


def operator() -> ModelProto:
    b, scales = weight_bytes(5, 48, 0)
    tensors = [
        raw("fc.weight", TensorProto.UINT8, b.shape, b.tobytes()),
        raw("fc.weight_scale", TensorProto.UINT8, scales.shape, scales.tobytes()),
        helper.make_tensor("fc.weight_scale_2", TensorProto.FLOAT, [1], [0.25]),
        helper.make_tensor("fc.input_scale", TensorProto.FLOAT, [], [3.0]),
        raw("fc.bias", TensorProto.FLOAT16, (5,), np.arange(5, dtype="<f2").tobytes()),
    ]
    inputs = ["x", *(tensor.name for tensor in tensors)]
    node = helper.make_node(
        "MatMulBlockQuantizedFp4Weight", inputs, ["y"], name="fc", domain="com.microsoft", block_size=16
    )
    return model_of([node], tensors)


def chain(*, axis: int, use: str) -> ModelProto:
    b, scales = weight_bytes(6, 32, 1)
    codes = np.stack([b & 15, b >> 4], -1).reshape(6, 32)
    if axis == 0:
        codes, scales = codes.T, scales.T
    flat = np.ascontiguousarray(codes).reshape(-1)
    tensors = [
        raw("fc.weight_f4", TensorProto.FLOAT4E2M1, codes.shape, (flat[0::2] | flat[1::2] << 4).tobytes()),
        raw("fc.scale", TensorProto.FLOAT8E4M3FN, scales.shape, np.ascontiguousarray(scales).tobytes()),
        raw("fc.global", TensorProto.FLOAT, (), np.float32(0.25).tobytes()),
        raw("one", TensorProto.FLOAT, (), np.float32(1).tobytes()),
        raw("fc.bias", TensorProto.FLOAT, (6,), np.arange(6, dtype="<f4").tobytes()),
    ]
    nodes = [
        helper.make_node("Div", ["one", "fc.global"], ["g"], "div"),
        helper.make_node("Cast", ["g"], ["h"], "cast", to=TensorProto.FLOAT16),
        helper.make_node("DequantizeLinear", ["fc.scale", "h"], ["s"], "d1"),
        helper.make_node("DequantizeLinear", ["fc.weight_f4", "s"], ["w"], "d2", axis=axis, block_size=16),
    ]
    if use == "Gemm":
        nodes.append(helper.make_node("Gemm", ["x", "w", "fc.bias"], ["y"], "mm", transB=int(axis != 0)))
    else:
        nodes.append(helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0] if axis else [0, 1]))
        nodes.append(helper.make_node("MatMul", ["x", "t"], ["z"], "mm"))
        nodes.append(helper.make_node("Add", ["fc.bias", "z"], ["y"]))
    return model_of(nodes, tensors)


def floats() -> ModelProto:
    values = np.linspace(-2, 2, 12 * 4).astype("<f4")
    tensors = [raw("w", TensorProto.FLOAT, (12, 4), values.tobytes())]
    tensors.append(raw("v", TensorProto.FLOAT16, (6, 4), values[:24].astype("<f2").tobytes()))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"], "mm"),
        helper.make_node("Gemm", ["z", "v"], ["y"], "gm", transB=1),
    ]
    return model_of(nodes, tensors)


def models() -> list[ModelProto]:
    return [operator(), *(chain(axis=axis, use=use) for axis in (1, 0) for use in ("Gemm", "MatMul")), floats()]
