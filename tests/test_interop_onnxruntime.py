"""Cross-checks with ONNX Runtime: its schema of the operator that fp4linear.onnx reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fp4linear import Fp4Linear
from tests import reference
from tests.interop import required

onnx = required("onnx")
runtime = required("onnxruntime")
state = required("onnxruntime.capi.onnxruntime_pybind11_state")
bridge = required("fp4linear.onnx")

OPERATOR = "MatMulBlockQuantizedFp4Weight"
SCHEMAS = [schema for schema in state.get_all_operator_schema() if schema.name == OPERATOR]
needs_schema = pytest.mark.skipif(not SCHEMAS, reason=f"this onnxruntime has no {OPERATOR} (1.32 has)")


def session(model: Any) -> Any:
    return runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def written(data_type: int, dtype: Any, **change: Any) -> Any:
    """A model of one written node with every input."""
    layer = Fp4Linear(*reference.make(7, 48, 1), 0.5, np.arange(7, dtype=np.float32))
    node, tensors = bridge.to_node(layer, "fc", "x", "y", dtype=dtype, input_scale=0.25)
    x = onnx.helper.make_tensor_value_info("x", data_type, ["M", 48])
    y = onnx.helper.make_tensor_value_info("y", data_type, ["M", 7])
    for name, value in change.items():
        node.attribute.append(onnx.helper.make_attribute(name, value))
    imports = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "g", [x], [y], tensors)
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)


@needs_schema
def test_the_schema_is_the_one_that_is_written() -> None:
    schema = SCHEMAS[0]
    assert (schema.domain, schema.since_version) == ("com.microsoft", 1)
    inputs = ["A", "B", "weight_scale", "weight_scale_2", "input_scale", "bias"]
    assert [value.name for value in schema.inputs] == inputs
    assert list(schema.attributes) == ["block_size"]
    assert "Default 16" in schema.attributes["block_size"].description


@needs_schema
@pytest.mark.parametrize(("data_type", "dtype"), [(10, "float16"), (16, "bfloat16")])
def test_a_written_model_passes_its_type_and_shape_checks(data_type: int, dtype: str) -> None:
    try:
        session(written(data_type, dtype))
    except state.NotImplemented as error:  # accepted; there is a kernel on GPUs only
        assert OPERATOR in str(error)


@needs_schema
def test_those_checks_refuse_what_does_not_fit() -> None:
    with pytest.raises((state.InvalidGraph, state.Fail)):
        session(written(1, "float16"))
    with pytest.raises((state.InvalidGraph, state.Fail)):
        session(written(10, "float16", no_such_attribute=1))
