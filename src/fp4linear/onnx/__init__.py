"""NVFP4 layers in ONNX models: reading, listing, writing.

Read are com.microsoft's MatMulBlockQuantizedFp4Weight nodes and FLOAT4E2M1 weights behind two DequantizeLinear nodes
(ModelOpt's export); written is the former. Needs the package onnx (`pip install "fp4linear[onnx]"`). A model is never
executed and nothing in it is trusted::

    layer = fp4linear.onnx.load("model.onnx", "model.layers.0.mlp.up_proj")
    small = fp4linear.onnx.quantize("model.onnx", activations="float16")
"""

try:
    import onnx as _onnx  # noqa: F401
except ImportError as error:
    raise ImportError('fp4linear.onnx needs the package onnx: pip install "fp4linear[onnx]"') from error

from fp4linear.onnx._reading import LayerInfo, layers, load
from fp4linear.onnx._writing import quantize, replace, to_node

__all__ = ["LayerInfo", "layers", "load", "quantize", "replace", "to_node"]
