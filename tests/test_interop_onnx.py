"""Cross-checks with onnx's own helpers and reference operators for FLOAT4E2M1 and FLOAT8E4M3FN."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from tests import reference
from tests.interop import assert_same_quantisation, required, weights

onnx = required("onnx")
required("onnx.reference")
if not hasattr(onnx.TensorProto, "FLOAT4E2M1") or not hasattr(ml_dtypes, "float4_e2m1fn"):
    pytest.skip("needs FLOAT4E2M1 (onnx 1.18, ml_dtypes 0.5)", allow_module_level=True)
FLOAT, FP4, FP8 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT4E2M1, onnx.TensorProto.FLOAT8E4M3FN


def run(nodes: list, inputs: dict[str, np.ndarray], result: int) -> np.ndarray:
    values = [onnx.helper.make_tensor_value_info(name, FLOAT, None) for name in inputs]
    graph = onnx.helper.make_graph(nodes, "g", values, [onnx.helper.make_tensor_value_info("y", result, None)])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)])
    return onnx.reference.ReferenceEvaluator(model).run(None, inputs)[0]


def test_packed_tensors() -> None:
    b, _ = reference.make(6, 32, 1)
    tensor = onnx.helper.make_tensor("w", FP4, (6, 32), b.tobytes(), raw=True)
    values = onnx.numpy_helper.to_array(tensor)
    ours = fp4linear.dequantize(b, np.full((6, 2), 0x38, np.uint8), 1.0)
    assert values.astype(np.float32).tobytes() == ours.tobytes()
    assert onnx.numpy_helper.from_array(values).raw_data == b.tobytes()


@pytest.mark.parametrize("ties", [False, True])
def test_two_level_quantiser(ties: bool) -> None:
    # Scales and codes by onnx's Cast and QuantizeLinear.
    w = weights(32, 128, 4, ties=ties)
    q = fp4linear.quantize(w)
    quotients = np.abs(w.reshape(32, 8, 16)).max(-1) / np.float32(6) / q.scale2
    scales = run([onnx.helper.make_node("Cast", ["x"], ["y"], to=FP8)], {"x": quotients}, FP8).view(np.uint8)
    steps = reference.E4M3[q.scales].astype(np.float32) * q.scale2
    node = onnx.helper.make_node(
        "QuantizeLinear", ["x", "s"], ["y"], axis=1, block_size=16, output_dtype=FP4, saturate=1
    )
    codes = run([node], {"x": w, "s": steps}, FP4).view(np.uint8)
    assert_same_quantisation(w, float(q.scale2), (q.b, q.scales), (reference.pack(codes), scales))
    assert_same_quantisation(w, float(q.scale2), (q.b, q.scales), (reference.pack(codes), q.scales))
