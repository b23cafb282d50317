"""A float ONNX model with its weights as NVFP4, and a layer out of it."""

import sys

import numpy as np

try:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    import fp4linear.onnx
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit()

import fp4linear

rng = np.random.default_rng(0)
w = rng.standard_normal((256, 512), dtype=np.float32) / 16  # [K, N], as MatMul multiplies by it
x_info = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 256])
y_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", 512])
node = helper.make_node("MatMul", ["x", "up_proj.weight"], ["y"], name="up_proj")
graph = helper.make_graph([node], "model", [x_info], [y_info], [numpy_helper.from_array(w, "up_proj.weight")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])

# Every MatMul and Gemm with a constant weight becomes a MatMulBlockQuantizedFp4Weight node, with casts around it.
small = fp4linear.onnx.quantize(model, activations="float16")
print([node.op_type for node in small.graph.node], f"{small.ByteSize() / model.ByteSize():.0%} of the float model")

# And back: a layer of the model, with the bytes that were written. A model is read, never run.
for info in fp4linear.onnx.layers(small):
    print(info.name, info.format, info.shape, info.problem)
layer = fp4linear.onnx.load(small, "up_proj")
x = rng.standard_normal((4, 256)).astype(np.float16)
y = layer(x)

exact = fp4linear.reference(x, *fp4linear.quantize(w.T))
assert np.abs(y - exact).max() < 1e-3 * np.abs(exact).max()
print(f"{layer} of ONNX {onnx.__version__}: y {y.shape} {y.dtype}")
