"""Cross-checks with ModelOpt: its ONNX export of NVFP4 and its quantiser of checkpoints."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import fp4linear
from tests.interop import assert_same_quantisation, required, weights

torch = required("torch")
onnx = required("onnx")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns about versions of libraries that play no part here
    NVFP4QuantExporter = required("modelopt.onnx.export").NVFP4QuantExporter
    NVFP4QTensor = required("modelopt.torch.quantization.qtensor").NVFP4QTensor
bridge = required("fp4linear.onnx")


def traced(w: np.ndarray, use: str) -> Any:
    """A linear layer as torch's exporter leaves it for ModelOpt's: a TRT_FP4QDQ node behind a float weight."""
    n, k = w.shape
    data_type = onnx.helper.np_dtype_to_tensor_dtype(w.dtype)
    make = onnx.helper.make_node
    nodes = [make("TRT_FP4QDQ", ["fc.weight"], ["w"], "qdq", domain="trt", block_size=16)]
    if use == "Gemm":
        nodes.append(make("Gemm", ["x", "w", "fc.bias"], ["y"], "mm", transB=1))
    else:
        nodes.append(make("Transpose", ["w"], ["wt"], "transpose", perm=[1, 0]))
        nodes += [make("MatMul", ["x", "wt"], ["z"], "mm"), make("Add", ["z", "fc.bias"], ["y"], "add")]
    tensors = [
        onnx.numpy_helper.from_array(w, "fc.weight"),
        onnx.numpy_helper.from_array(np.arange(n, dtype=w.dtype), "fc.bias"),
    ]
    info = onnx.helper.make_tensor_value_info
    values = [info("w", data_type, [n, k]), info("wt", data_type, [k, n]), info("z", data_type, ["M", n])]
    graph = onnx.helper.make_graph(
        nodes, "g", [info("x", data_type, ["M", k])], [info("y", data_type, ["M", n])], tensors, value_info=values
    )
    imports = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("trt", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports)


@pytest.mark.parametrize("use", ["Gemm", "MatMul"])
def test_onnx_export(use: str) -> None:
    w = weights(32, 128, 1).astype(np.float16)
    model = NVFP4QuantExporter.process_model(traced(w, use))
    assert not any(node.op_type == "TRT_FP4QDQ" for node in model.graph.node)
    infos = bridge.layers(model)
    assert [(info.format, info.shape, info.problem) for info in infos] == [("DequantizeLinear", (32, 128), None)]
    layer = bridge.load(model, "fc.weight")
    b, scales, scale2 = layer.canonical()
    q = fp4linear.quantize(w)
    np.testing.assert_allclose(scale2, q.scale2, rtol=2.0**-22)
    ours = fp4linear.quantize(w, scale2=float(scale2))
    assert_same_quantisation(w.astype(np.float32), float(scale2), (ours.b, ours.scales), (b, scales))
    assert np.array_equal(layer.bias, np.arange(32))


def test_quantiser_of_checkpoints() -> None:
    w = weights(32, 128, 2)
    quantised, scales, scale2 = NVFP4QTensor.quantize(torch.from_numpy(w), 16)
    q = fp4linear.quantize(w)
    np.testing.assert_allclose(scale2.numpy(), q.scale2, rtol=2.0**-22)
    ours = fp4linear.quantize(w, scale2=float(scale2))
    theirs = (quantised._quantized_data.numpy(), scales.view(torch.uint8).numpy())
    assert_same_quantisation(w, float(scale2), (ours.b, ours.scales), theirs)
