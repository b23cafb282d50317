"""`fp4linear.onnx`: nodes and chains to layers and back, checked by onnx's own evaluator where it has the operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fp4linear
from fp4linear import Fp4Linear
from tests import reference
from tests.tolerance import assert_within_contract

onnx = pytest.importorskip("onnx", minversion="1.19", reason="onnx (1.19 or later) is not installed")
from onnx import ModelProto, NodeProto, TensorProto, helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx.reference.op_run import OpRun  # noqa: E402

import fp4linear.onnx as bridge  # noqa: E402
from fp4linear.files import FormatError  # noqa: E402

OPSETS = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("trt", 1)]
HALF = TensorProto.FLOAT16


class MatMulBlockQuantizedFp4Weight(OpRun):
    """The operator by its schema's words, in float64, for onnx's evaluator."""

    op_domain = "com.microsoft"

    def _run(self, a: Any, b: Any, scales: Any, scale2: Any, input_scale: Any = None, bias: Any = None, **kwargs: Any):
        block_size = kwargs.get("block_size") or 16
        y = reference.linear(a, b, scales, scale2, bias, block_size=block_size).y
        return (y.astype(a.dtype),)


def raw(name: str, data_type: int, dims: tuple[int, ...], data: bytes) -> TensorProto:
    return helper.make_tensor(name, data_type, dims, data, raw=True)


def model_of(nodes: list[NodeProto], tensors: list[TensorProto], x: Any = None, y: Any = None) -> ModelProto:
    x = x or helper.make_tensor_value_info("x", HALF, None)
    y = y or helper.make_tensor_value_info("y", HALF, None)
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], tensors), opset_imports=OPSETS, ir_version=11)


def operator(n: int = 5, k: int = 48, block_size: int | None = None, seed: int = 0, **attributes: Any) -> ModelProto:
    """A model of one node `fc` with every input; its weight is that of weight(n, k, seed)."""
    b, scales = weight(n, k, seed, block_size or 16)
    bias = np.arange(n, dtype=np.float16)
    tensors = [
        raw("fc.weight", TensorProto.UINT8, b.shape, b.tobytes()),
        raw("fc.weight_scale", TensorProto.UINT8, scales.shape, scales.tobytes()),
        helper.make_tensor("fc.weight_scale_2", TensorProto.FLOAT, [1], [0.25]),
        helper.make_tensor("fc.input_scale", TensorProto.FLOAT, [], [3.0]),
        raw("fc.bias", HALF, (n,), bias.tobytes()),
    ]
    if block_size is not None:
        attributes["block_size"] = block_size
    inputs = ["x", *(tensor.name for tensor in tensors)]
    node = helper.make_node(bridge._reading.OPERATOR, inputs, ["y"], name="fc", domain="com.microsoft", **attributes)
    return model_of([node], tensors)


def weight(n: int, k: int, seed: int, block_size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return b, random.integers(0x20, 0x59, (n, -(-k // block_size)), dtype=np.uint8)


def chain(
    n: int = 6,
    k: int = 32,
    *,
    axis: int = -1,
    scale2: Any = 0.25,
    scale2_axis: int | None = None,
    use: str = "Gemm",
    bias: bool = True,
    domain: str = "",
    block_size: int = 16,
    seed: int = 1,
) -> ModelProto:
    """ModelOpt's two DequantizeLinear nodes over `fc.weight_f4`, and a MatMul or Gemm `mm`; y is float32."""
    b, scales = weight(n, k, seed, block_size)
    codes = reference.codes(b)
    if axis == 0:
        codes, scales = codes.T, np.ascontiguousarray(scales.T)
    factor = np.asarray(scale2, np.float32)
    tensors = [
        raw("fc.weight_f4", TensorProto.FLOAT4E2M1, codes.shape, reference.pack(codes.reshape(1, -1)).tobytes()),
        raw("fc.weight_f8_scale", TensorProto.FLOAT8E4M3FN, scales.shape, scales.tobytes()),
        raw("fc.weight_f8_scale_f32_scale", TensorProto.FLOAT, factor.shape, factor.tobytes()),
        helper.make_tensor("fc.bias", TensorProto.FLOAT, [n], np.arange(n, dtype=np.float32)),
    ]
    first = {} if scale2_axis is None else {"axis": scale2_axis}
    nodes = [
        helper.make_node("DequantizeLinear", [tensors[1].name, tensors[2].name], ["s"], "d1", domain=domain, **first),
        helper.make_node(
            "DequantizeLinear", [tensors[0].name, "s"], ["w"], "d2", domain=domain, axis=axis, block_size=block_size
        ),
    ]
    if use == "Gemm":
        inputs = ["x", "w", "fc.bias"] if bias else ["x", "w"]
        nodes.append(helper.make_node("Gemm", inputs, ["y"], "mm", transB=int(axis != 0)))
    else:
        w = "w"
        if axis != 0:
            nodes.append(helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0]))
            w = "wt"
        nodes.append(helper.make_node("MatMul", ["x", w], ["z" if bias else "y"], "mm"))
        if bias:
            nodes.append(helper.make_node("Add", ["fc.bias", "z"], ["y"]))
    if not bias:
        tensors.pop()
    single = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    return model_of(nodes, tensors, single, helper.make_tensor_value_info("y", TensorProto.FLOAT, None))


def evaluated(model: ModelProto, x: np.ndarray) -> np.ndarray:
    return ReferenceEvaluator(model, new_ops=[MatMulBlockQuantizedFp4Weight]).run(None, {"x": x})[0]


def tensor_of(model: ModelProto, name: str) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == name)


def x_of(m: int, k: int, dtype: Any = np.float16) -> np.ndarray:
    return np.random.default_rng(99).standard_normal((m, k)).astype(dtype)


# Reading


@pytest.mark.parametrize(("k", "block_size"), [(48, None), (48, 16), (40, 16), (96, 32), (6, 4)])
def test_operator_to_layer(k: int, block_size: int | None) -> None:
    model = operator(5, k, block_size)
    layer = bridge.load(model, "fc")
    b, scales = weight(5, k, 0, block_size or 16)
    got = layer.canonical()
    assert np.array_equal(got[0], b)
    assert np.array_equal(got[1], scales)
    assert got[2] == np.float32(0.25)
    assert layer.block_size == (block_size or 16)
    assert np.array_equal(layer.bias, np.arange(5))
    x = x_of(3, k)
    expected = reference.linear(x, b, scales, 0.25, np.arange(5), block_size=block_size or 16)
    assert_within_contract(layer.forward(x), expected)


@pytest.mark.parametrize("use", ["Gemm", "MatMul"])
@pytest.mark.parametrize("axis", [-1, 1, 0, -2])
@pytest.mark.parametrize("domain", ["", "trt"])
def test_chain_to_layer(use: str, axis: int, domain: str) -> None:
    layer = bridge.load(chain(6, 40, use=use, axis=axis % 2, domain=domain))
    b, scales = weight(6, 40, 1)
    got = layer.canonical()
    assert np.array_equal(got[0], b)
    assert np.array_equal(got[1], scales)
    assert np.array_equal(layer.bias, np.arange(6))


@pytest.mark.parametrize("use", ["Gemm", "MatMul"])
@pytest.mark.parametrize("axis", [-1, 0])
def test_chain_against_the_evaluator_of_onnx(use: str, axis: int) -> None:
    # With a power of two as the global scale nothing in the chain rounds, so onnx's float32 weight is ours bit for bit.
    model = chain(7, 64, use=use, axis=axis)
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, None))
    x = x_of(4, 64, np.float32)
    y, w = ReferenceEvaluator(model).run(None, {"x": x})
    layer = bridge.load(model)
    assert np.array_equal(layer.dequantize(), w if axis else w.T)
    np.testing.assert_allclose(layer.forward(x), y, rtol=1e-5, atol=1e-5 * float(np.abs(y).max()))


def test_chain_of_any_global_scale_is_rounded_once() -> None:
    model = chain(7, 64, scale2=0.3, use="MatMul")
    model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, None))
    w = ReferenceEvaluator(model).run(None, {"x": x_of(1, 64, np.float32)})[1]
    ours = bridge.load(model).dequantize()
    exact = reference.dequantize(*weight(7, 64, 1), 0.3)
    assert np.array_equal(ours, exact.astype(np.float32))
    np.testing.assert_allclose(w, exact, rtol=2.0**-23)  # onnx's chain rounds twice


def test_one_global_scale_a_row() -> None:
    scale2 = np.array([0.5, 0.25, 1, 2, 4, 0.125], np.float32)
    for axis, scale2_axis in ((-1, 0), (0, 1)):
        model = chain(6, 32, axis=axis, scale2=scale2, scale2_axis=scale2_axis, use="MatMul")
        model.graph.output.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, None))
        w = ReferenceEvaluator(model).run(None, {"x": x_of(1, 32, np.float32)})[1]
        layer = bridge.load(model)
        assert np.array_equal(layer.scale2, scale2)
        assert np.array_equal(layer.dequantize(), w.T if axis == 0 else w)
    with pytest.raises(
        FormatError, match=r"global scale .*\[6\] along axis 1, expected one element or \[6\] along axis 0"
    ):
        bridge.load(chain(6, 32, scale2=scale2, scale2_axis=1))


@pytest.mark.parametrize("name", ["fc.weight_f4", "fc.weight", "fc", "d2", "mm", None])
def test_names_of_a_chain(name: str | None) -> None:
    assert bridge.load(chain(), name).out_features == 6


def test_packing_of_onnx_helpers() -> None:
    # make_tensor packs floats itself; non-raw tensors keep the bytes in int32_data.
    values = reference.E2M1[np.arange(16)].astype(np.float32)
    model = chain(1, 16, bias=False)
    tensor = tensor_of(model, "fc.weight_f4")
    tensor.CopyFrom(helper.make_tensor(tensor.name, TensorProto.FLOAT4E2M1, [1, 16], values))
    assert not tensor.HasField("raw_data")
    scales = tensor_of(model, "fc.weight_f8_scale")
    scales.CopyFrom(helper.make_tensor(scales.name, TensorProto.FLOAT8E4M3FN, [1, 1], [2.0]))
    got = bridge.load(model).dequantize()
    assert got.tobytes() == (values * np.float32(0.5)).reshape(1, 16).tobytes()  # the sign of zero too


def test_layers_lists_without_reading(tmp_path: Path) -> None:
    model = chain(6, 32)
    tensor = tensor_of(model, "fc.weight_f4")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="missing.bin")
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for source in (path, str(path)):
        assert bridge.layers(source) == [
            bridge.LayerInfo("fc.weight_f4", "DequantizeLinear", "fc.weight_f4", "fc.bias", (6, 32), 16, None)
        ]
    assert bridge.layers(operator(5, 48))[0] == bridge.LayerInfo(
        "fc", bridge._reading.OPERATOR, "fc.weight", "fc.bias", (5, 48), 16, None
    )


def test_bias_is_found_replaced_and_left_out() -> None:
    zeros = np.zeros((1, 32), np.float16)
    for use in ("Gemm", "MatMul"):
        model = chain(6, 32, use=use)
        assert bridge.load(model).forward(zeros)[0].tolist() == [0, 1, 2, 3, 4, 5]
        assert bridge.load(model, bias=None).forward(zeros)[0].tolist() == [0] * 6
        assert bridge.load(model, bias=np.full(6, 3, np.float32)).forward(zeros)[0].tolist() == [3] * 6
        assert bridge.load(chain(6, 32, use=use, bias=False)).bias is None


def test_an_added_constant_is_no_bias_where_others_read_the_product() -> None:
    model = chain(6, 32, use="MatMul")
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert bridge.load(model).bias is None


def test_a_weight_that_two_nodes_share() -> None:
    model = chain(6, 32, use="Gemm")
    other = helper.make_node("Gemm", ["x", "w"], ["y2"], "second", transB=1)
    model.graph.node.append(other)
    assert [layer.name for layer in bridge.layers(model)] == ["mm", "second"]
    assert bridge.load(model, "second").bias is None
    assert bridge.load(model, "mm").bias is not None
    with pytest.raises(ValueError, match="is 2 layers, expected the name of one: 'mm', 'second'"):
        bridge.load(model, "fc.weight")
    assert bridge.load(model, "fc.weight", bias=None).out_features == 6


def test_nan_scales_follow_the_argument() -> None:
    model = operator(5, 48)
    tensor = tensor_of(model, "fc.weight_scale")
    tensor.raw_data = b"\x7f" + tensor.raw_data[1:]
    with pytest.raises(ValueError, match="NaN"):
        bridge.load(model)
    assert np.isnan(bridge.load(model, nan_scales="propagate").dequantize()).sum() == 16
    assert not bridge.load(model, nan_scales="zero").dequantize()[0, :16].any()


@pytest.mark.parametrize("to", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_a_cast_of_the_global_scale_keeps_its_rounding(to: int) -> None:
    model = chain(6, 32, scale2=0.3)
    model.graph.node.insert(0, helper.make_node("Cast", ["fc.weight_f8_scale_f32_scale"], ["g"], to=to))
    model.graph.node[1].input[1] = "g"
    dtype = np.float16 if to == TensorProto.FLOAT16 else ml_dtypes.bfloat16
    assert bridge.load(model).scale2 == np.float32(dtype(0.3))


def test_a_divided_global_scale() -> None:
    # A checkpoint's divisor, turned into a factor by the graph.
    model = operator(5, 48)
    model.graph.initializer.append(helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0]))
    tensor_of(model, "fc.weight_scale_2").CopyFrom(
        helper.make_tensor("fc.weight_scale_2", TensorProto.FLOAT, [1], [3584.0])
    )
    model.graph.node.insert(0, helper.make_node("Div", ["one", "fc.weight_scale_2"], ["r"]))
    model.graph.node[1].input[3] = "r"
    assert bridge.load(model).scale2 == np.float32(1) / np.float32(3584)


def test_constants_behind_nodes() -> None:
    model = operator(5, 48)
    b = tensor_of(model, "fc.weight")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=b))
    model.graph.node.insert(1, helper.make_node("Identity", ["c"], ["i"]))
    model.graph.node[2].input[1] = "i"
    model.graph.initializer.remove(b)
    assert np.array_equal(bridge.load(model).canonical()[0], weight(5, 48, 0)[0])


# Files


def external(model: ModelProto, name: str, location: str, data: bytes, **entries: Any) -> TensorProto:
    tensor = tensor_of(model, name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_external_data(tmp_path: Path) -> None:
    model = operator(5, 48)
    data = tensor_of(model, "fc.weight").raw_data
    external(model, "fc.weight", "data/w.bin", data, offset=64, length=len(data))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "w.bin").write_bytes(b"\xee" * 64 + data + b"\xee" * 8)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    for loaded in (bridge.load(path), bridge.load(model, folder=tmp_path)):
        assert np.array_equal(loaded.canonical()[0], weight(5, 48, 0)[0])
    with pytest.raises(FormatError, match="folder= must say"):
        bridge.load(model)


def test_files_that_onnx_saved(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save_model(chain(64, 128), path, save_as_external_data=True, location="m.data", size_threshold=0)
    assert np.array_equal(bridge.load(path, "fc").canonical()[0], weight(64, 128, 1)[0])


@pytest.mark.parametrize(
    "location", ["../w.bin", "/etc/hostname", "a/../../w.bin", "..\\w.bin", "C:\\w.bin", "", "a\0b", "\\w.bin"]
)
def test_external_paths_stay_below_the_model(tmp_path: Path, location: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(5 * 24))
    inside = tmp_path / "inside"
    inside.mkdir()
    model = operator(5, 48)
    external(model, "fc.weight", location, b"")
    with pytest.raises(FormatError, match="not a path below the model's folder"):
        bridge.load(model, folder=inside)


def test_a_link_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(5 * 24))
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "w.bin").symlink_to("../w.bin")
    model = operator(5, 48)
    external(model, "fc.weight", "w.bin", b"")
    with pytest.raises(FormatError, match="leads out of the model's folder"):
        bridge.load(model, folder=inside)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"length": 119}, "got length 119, expected 120 for UINT8"),
        ({"offset": 2}, r"got 121 bytes, expected 122 \(offset 2 \+ 120\)"),
        ({"offset": -1}, "got offset '-1', expected a number of bytes"),
        ({"offset": 10**19}, "expected a number of bytes"),
        ({"length": "1e2"}, "got length '1e2'"),
    ],
)
def test_external_sizes(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(121))
    model = operator(5, 48)
    external(model, "fc.weight", "w.bin", b"", **entries)
    with pytest.raises(FormatError, match=message):
        bridge.load(model, folder=tmp_path)
    with pytest.raises(FormatError, match="no such file"):
        bridge.load(model, folder=tmp_path / "elsewhere")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    whole = operator(5, 48).SerializeToString()
    path.write_bytes(whole[:-7])
    with pytest.raises(FormatError, match=r"m\.onnx'?: not an ONNX model"):
        bridge.layers(path)
    with pytest.raises(OSError, match=r"missing\.onnx"):
        bridge.layers(tmp_path / "missing.onnx")


def test_cut_and_flipped_bytes_never_crash(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    random = np.random.default_rng(7)
    outcomes = set()
    for model in (operator(3, 32), chain(4, 32)):
        whole = np.frombuffer(model.SerializeToString(), np.uint8)
        for _ in range(300):
            bad = whole.copy()
            for at in random.integers(0, bad.size, random.integers(1, 4)):
                bad[at] = random.integers(0, 256)
            path.write_bytes(
                bad[: random.integers(1, bad.size + 1)].tobytes() if random.random() < 0.2 else bad.tobytes()
            )
            try:
                bridge.load(path)
                outcomes.add("loaded")
            except ValueError:
                outcomes.add("refused")
    assert outcomes == {"loaded", "refused"}


def test_nodes_with_missing_parts_never_crash() -> None:
    outcomes = []
    models = [operator(3, 32), dense(HALF, gemm=True, c=(6,))]
    models += [chain(4, 32, use=use, axis=axis) for use in ("Gemm", "MatMul") for axis in (0, 1)]
    for whole in models:
        for at, node in enumerate(whole.graph.node):
            for field in ("input", "output", "attribute"):
                for length in range(len(getattr(node, field))):
                    model = ModelProto.FromString(whole.SerializeToString())
                    del getattr(model.graph.node[at], field)[length:]
                    for call in (bridge.load, bridge.layers, bridge.quantize):
                        try:
                            call(model)
                            outcomes.append(True)
                        except ValueError:
                            outcomes.append(False)
    assert len(outcomes) > 150
    assert any(outcomes)
    assert not all(outcomes)


# What is refused


@pytest.mark.parametrize(
    ("name", "data_type", "dims", "message"),
    [
        ("fc.weight", TensorProto.UINT8, (120,), r"B 'fc.weight': got shape \[120\], expected \[N, K/2\]"),
        ("fc.weight", TensorProto.UINT8, (1 << 40, 0), r"got out_features 1099511627776 and in_features 0"),
        ("fc.weight", TensorProto.UINT8, (0, 1 << 40), r"got out_features 0 and in_features"),
        ("fc.weight", TensorProto.UINT8, (5, 23), r"got 120 bytes of data, expected 115"),
        ("fc.weight", TensorProto.UINT8, (-5, 24), r"got shape \[-5, 24\], expected dimensions >= 0"),
        ("fc.weight", TensorProto.UINT8, (5, 1 << 62), r"weight_scale 'fc.weight_scale': got shape \[5, 3\]"),
        ("fc.weight", TensorProto.INT8, (5, 24), r"B 'fc.weight': got INT8, expected UINT8"),
        ("fc.weight_scale", TensorProto.UINT8, (3, 5), r"got shape \[3, 5\], expected \[5, 3\]"),
        ("fc.weight_scale", TensorProto.FLOAT8E4M3FN, (5, 3), r"got FLOAT8E4M3FN, expected UINT8"),
        ("fc.weight_scale_2", TensorProto.UINT8, (4,), r"got UINT8, expected FLOAT or FLOAT16 or BFLOAT16"),
        ("fc.bias", HALF, (1, 5, 1), r"bias 'fc.bias' of 'fc': got shape \[1, 5, 1\], expected \[5\]"),
        ("fc.input_scale", TensorProto.FLOAT, (2,), r"input_scale 'fc.input_scale': got \[2\], expected one element"),
    ],
)
def test_tensors_of_a_node_that_do_not_fit(name: str, data_type: int, dims: tuple[int, ...], message: str) -> None:
    model = operator(5, 48)
    tensor = tensor_of(model, name)
    tensor.data_type = data_type
    del tensor.dims[:]
    tensor.dims.extend(dims)
    with pytest.raises(FormatError, match=message):
        bridge.load(model)


@pytest.mark.parametrize("value", [np.inf, np.nan, -np.inf])
def test_global_scales_are_finite(value: float) -> None:
    with pytest.raises(FormatError, match=r"fc\.weight_f8_scale_f32_scale.*expected finite values"):
        bridge.load(chain(scale2=value))


def test_attributes_that_do_not_fit() -> None:
    with pytest.raises(FormatError, match="got block_size 0, expected a number >= 1"):
        bridge.load(operator(block_size=0))
    with pytest.raises(FormatError, match="got K = 64, expected 48 by B"):
        bridge.load(operator(5, 48, K=64))
    assert bridge.load(operator(5, 48, K=48, N=5)).in_features == 48
    with pytest.raises(FormatError, match="got block_size 0, expected blocks"):
        bridge.load(edited(chain(), lambda nodes: attribute(nodes[1], "block_size", 0)))
    with pytest.raises(FormatError, match="got axis 2, expected"):
        bridge.load(edited(chain(), lambda nodes: attribute(nodes[1], "axis", 2)))


def attribute(node: NodeProto, name: str, value: Any) -> None:
    kept = [entry for entry in node.attribute if entry.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def edited(model: ModelProto, edit: Any) -> ModelProto:
    edit(model.graph.node)
    return model


def test_look_alikes_are_refused_by_name() -> None:
    model = chain(6, 32)
    scales = tensor_of(model, "fc.weight_f8_scale")
    del model.graph.node[0]
    scales.name, scales.data_type = "s", TensorProto.FLOAT8E8M0
    with pytest.raises(FormatError, match="FLOAT8E8M0, which is MXFP4 and not NVFP4"):
        bridge.load(model)
    assert "MXFP4" in str(bridge.layers(model)[0].problem)
    scales.data_type = TensorProto.FLOAT
    with pytest.raises(FormatError, match="one level of FLOAT, expected DequantizeLinear"):
        bridge.load(model)


def test_uses_that_are_no_linear_layer() -> None:
    model = edited(chain(6, 32), lambda nodes: attribute(nodes[2], "transB", 0))
    with pytest.raises(FormatError, match="blocks run along axis 1, but Gemm 'mm' sums over axis 0"):
        bridge.load(model)
    with pytest.raises(FormatError, match=r"got alpha 2\.0 of Gemm 'mm', expected 1"):
        bridge.load(edited(chain(), lambda nodes: attribute(nodes[2], "alpha", 2.0)))
    with pytest.raises(FormatError, match=r"beta is 2\.0, expected 1"):
        bridge.load(edited(chain(), lambda nodes: attribute(nodes[2], "beta", 2.0)))
    assert bridge.load(edited(chain(), lambda nodes: attribute(nodes[2], "beta", 0.0))).bias is None
    with pytest.raises(FormatError, match="got in_features 15, expected an even number"):
        model = chain(6, 16)
        tensor_of(model, "fc.weight_f4").dims[1] = 15
        bridge.load(model)


def test_zero_points() -> None:
    model = chain(6, 32)
    model.graph.initializer.append(raw("zero", TensorProto.FLOAT8E4M3FN, (), b"\0"))
    model.graph.node[0].input.append("zero")
    assert bridge.load(model).in_features == 32
    tensor_of(model, "zero").raw_data = b"\x38"
    with pytest.raises(FormatError, match="zero point 'zero' is not zero"):
        bridge.load(model)


def test_values_that_are_not_constant() -> None:
    model = operator(5, 48)
    model.graph.node[0].input[1] = "x"
    with pytest.raises(FormatError, match="B 'x': expected a constant, got an input of the model"):
        bridge.load(model)
    model = operator(5, 48)
    model.graph.node.insert(0, helper.make_node("Sqrt", ["fc.weight_scale_2"], ["r"], "root"))
    model.graph.node[1].input[3] = "r"
    with pytest.raises(FormatError, match="global scale 'r': expected a constant, got the result of Sqrt 'root'"):
        bridge.load(model)


def test_graphs_that_run_in_circles() -> None:
    model = operator(5, 48)
    for op in ("Identity", "Cast", "Div"):
        inputs = ["loop", "loop"] if op == "Div" else ["loop"]
        node = helper.make_node(op, inputs, ["loop"], **({"to": TensorProto.FLOAT} if op == "Cast" else {}))
        changed = ModelProto.FromString(model.SerializeToString())
        changed.graph.node.append(node)
        changed.graph.node[0].input[3] = "loop"
        with pytest.raises(FormatError, match="global scale 'loop': expected a constant"):
            bridge.load(changed)
    looped = chain(6, 32, use="MatMul", bias=False)
    looped.graph.node.append(helper.make_node("Cast", ["w"], ["u"], to=HALF))
    looped.graph.node.append(helper.make_node("Identity", ["u"], ["v"]))
    looped.graph.node.append(helper.make_node("Identity", ["v"], ["w2"]))
    assert bridge.load(looped).in_features == 32


def test_names_made_twice() -> None:
    model = operator(5, 48)
    model.graph.initializer.append(tensor_of(model, "fc.bias"))
    with pytest.raises(FormatError, match=r"two initialisers are named 'fc\.bias'"):
        bridge.layers(model)
    model = operator(5, 48)
    model.graph.node.append(model.graph.node[0])
    with pytest.raises(FormatError, match="the value 'y' is made twice"):
        bridge.layers(model)


def test_names_that_are_not_text(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(operator(5, 48).SerializeToString().replace(b"fc.bias", b"fc.bia\xff"))
    with pytest.raises(FormatError, match=r"got the name b'fc\.bia\\xff', expected UTF-8"):
        bridge.load(path)


def test_names_that_are_not_there() -> None:
    model = operator(5, 48)
    with pytest.raises(ValueError, match="name: got 'fd', expected one of the model's NVFP4 layers: fc"):
        bridge.load(model, "fd")
    with pytest.raises(ValueError, match="name: got None, expected one of the model's 0 NVFP4 layers: none"):
        bridge.load(model_of([], []))
    with pytest.raises(TypeError, match="name: got int"):
        bridge.load(model, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model: got int, expected a path or an onnx\.ModelProto"):
        bridge.load(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias: got 'none', expected 'auto'"):
        bridge.load(model, bias="none")


# Writing


def layer_of(n: int, k: int, seed: int = 5, scale2: Any = 0.3, bias: Any = None, **options: Any) -> Fp4Linear:
    return Fp4Linear(*weight(n, k, seed, options.get("block_size", 16)), scale2, bias, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("k", "block_size"), [(48, 16), (40, 16), (64, 32)])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("input_scale", [None, 0.5])
def test_a_written_node_reads_back(
    dtype: Any, k: int, block_size: int, with_bias: bool, input_scale: float | None
) -> None:
    bias = np.arange(-3, 4, dtype=np.float32) if with_bias else None
    layer = layer_of(7, k, bias=bias, block_size=block_size)
    node, tensors = bridge.to_node(layer, "fc", "x", "y", dtype=dtype, input_scale=input_scale)
    back = bridge.load(model_of([node], tensors), "fc")
    for ours, theirs in zip(layer.canonical(), back.canonical(), strict=True):
        assert np.array_equal(ours, theirs)
    assert back.block_size == block_size
    assert (back.bias is None) == (bias is None)
    assert bias is None or np.array_equal(back.bias, bias)
    # Optional inputs: none at the end, an empty name before one that is there.
    assert (
        list(node.input[4:])
        == {
            (True, True): ["fc.input_scale", "fc.bias"],
            (True, False): ["", "fc.bias"],
            (False, True): ["fc.input_scale"],
            (False, False): [],
        }[(with_bias, input_scale is not None)]
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_written_model_computes_the_layer(dtype: Any) -> None:
    layer = layer_of(7, 48, bias=np.arange(7, dtype=np.float32))
    data_type = HALF if dtype is np.float16 else TensorProto.BFLOAT16
    node, tensors = bridge.to_node(layer, "fc", "x", "y", dtype=np.dtype(dtype).name)
    model = model_of(
        [node],
        tensors,
        helper.make_tensor_value_info("x", data_type, ["M", 48]),
        helper.make_tensor_value_info("y", data_type, ["M", 7]),
    )
    onnx.checker.check_model(model)
    x = x_of(3, 48, dtype)
    y = evaluated(model, x)
    assert y.dtype == dtype
    assert_within_contract(layer.forward(x), reference.linear(x, *layer.canonical(), layer.bias))
    assert_within_contract(y, reference.linear(x, *layer.canonical(), layer.bias))


def test_a_bias_that_does_not_fit_is_refused_or_rounded() -> None:
    bias = np.array([1 + 2.0**-12] * 7, np.float32)
    layer = layer_of(7, 48, bias=bias)
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(ValueError, match=f"layer: its bias does not fit {dtype}.*round_bias=True"):
            bridge.to_node(layer, "fc", "x", "y", dtype=dtype)
        node, tensors = bridge.to_node(layer, "fc", "x", "y", dtype=dtype, round_bias=True)
        assert np.array_equal(bridge.load(model_of([node], tensors)).bias, np.ones(7))


@pytest.mark.parametrize("seed", range(3))
def test_rounding_of_a_bias_is_that_of_the_type(seed: int) -> None:
    random = np.random.default_rng(seed)
    bias = random.integers(0, 1 << 32, 4096, dtype=np.uint32).view(np.float32)
    bias = np.where(np.isnan(bias), np.float32(1), bias)
    bias[::2] = (bias[::2].view(np.uint32) & np.uint32(0xFFFF0000) | np.uint32(0x8000)).view(np.float32)  # ties
    layer = layer_of(4096, 2, bias=bias)
    _, tensors = bridge.to_node(layer, "fc", "x", "y", dtype="bfloat16", round_bias=True)
    assert tensors[-1].raw_data == bias.astype(ml_dtypes.bfloat16).tobytes()


def test_nan_scales_that_read_as_zero_are_written_as_zero() -> None:
    b, scales = weight(3, 32, 2)
    scales[1, 1] = 0x7F
    for mode, expected in (("zero", 0), ("propagate", 0x7F)):
        _, tensors = bridge.to_node(Fp4Linear(b, scales, 1.0, nan_scales=mode), "fc", "x", "y")
        written = np.frombuffer(tensors[1].raw_data, np.uint8).reshape(3, 2)
        assert written[1, 1] == expected
        assert (written != scales).sum() == (expected == 0)


def test_layers_that_a_node_cannot_hold() -> None:
    rows = layer_of(3, 32, scale2=np.array([1, 2, 3], np.float32))
    with pytest.raises(ValueError, match="layer: scale2 has 3 elements, expected 1"):
        bridge.to_node(rows, "fc", "x", "y")
    layer = layer_of(3, 32)
    with pytest.raises(ValueError, match="dtype: got 'float32', expected 'float16' or 'bfloat16'"):
        bridge.to_node(layer, "fc", "x", "y", dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x: got '', expected a name"):
        bridge.to_node(layer, "fc", "", "y")
    with pytest.raises(TypeError, match="name: got int, expected str"):
        bridge.to_node(layer, 3, "x", "y")  # type: ignore[arg-type]
    for value in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"input_scale: got .*, expected a finite number > 0"):
            bridge.to_node(layer, "fc", "x", "y", input_scale=value)


def dense(data_type: int, *, gemm: bool, n: int = 6, k: int = 32, c: tuple[int, ...] | None = None) -> ModelProto:
    """x · W (+ c) with a float weight `fc.weight`, its name also that of an input as ModelOpt leaves it."""
    dtype = helper.tensor_dtype_to_np_dtype(data_type)
    w = np.random.default_rng(3).standard_normal((n, k)).astype(dtype)
    w = w if gemm else np.ascontiguousarray(w.T)
    tensors = [raw("fc.weight", data_type, w.shape, w.tobytes())]
    inputs = ["x", "fc.weight"]
    if c is not None:
        values = np.random.default_rng(4).standard_normal(c).astype(dtype)
        tensors.append(raw("fc.c", data_type, c, values.tobytes()))
        inputs.append("fc.c")
    attributes = {"transB": 1} if gemm else {}
    node = helper.make_node("Gemm" if gemm else "MatMul", inputs, ["y"], "mm", **attributes)
    x, y = (helper.make_tensor_value_info(name, data_type, ["M", size]) for name, size in (("x", k), ("y", n)))
    model = model_of([node], tensors, x, y)
    model.graph.input.append(helper.make_tensor_value_info("fc.weight", data_type, w.shape))
    return model


@pytest.mark.parametrize("data_type", [TensorProto.FLOAT, HALF, TensorProto.BFLOAT16])
@pytest.mark.parametrize(("gemm", "c"), [(False, None), (True, None), (True, (6,)), (True, (1, 6)), (True, ())])
def test_a_quantised_model_computes_the_quantised_layer(data_type: int, gemm: bool, c: Any) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(data_type)
    model = dense(data_type, gemm=gemm, c=c)
    before = model.SerializeToString()
    w = np.frombuffer(tensor_of(model, "fc.weight").raw_data, dtype).reshape(tensor_of(model, "fc.weight").dims)
    quantized = fp4linear.quantize(w if gemm else w.T)
    result = bridge.quantize(model, activations="float16" if data_type == TensorProto.FLOAT else None)
    assert model.SerializeToString() == before

    assert [tensor.name for tensor in result.graph.initializer if "weight" in tensor.name] == [
        f"fc.nvfp4.{part}" for part in ("weight", "weight_scale", "weight_scale_2")
    ]
    assert [value.name for value in result.graph.input] == ["x"]
    adds = [node for node in result.graph.node if node.op_type == "Add"]
    assert len(adds) == (c is not None and (data_type == TensorProto.FLOAT or c != (6,)))
    layer = bridge.load(result, "mm", bias=None)
    for ours, theirs in zip(quantized, layer.canonical(), strict=True):
        assert np.array_equal(ours, theirs)

    x = x_of(4, 32, np.float16).astype(dtype)
    inner = x.astype(np.float16) if data_type == TensorProto.FLOAT else x
    expected = reference.linear(inner, *quantized).y.astype(inner.dtype).astype(np.float64)
    if c is not None:
        expected = expected + np.frombuffer(tensor_of(model, "fc.c").raw_data, dtype).reshape(c).astype(np.float64)
    got = evaluated(result, x)
    assert got.dtype == dtype
    step = {TensorProto.FLOAT: 2.0**-10, HALF: 2.0**-9, TensorProto.BFLOAT16: 2.0**-6}[data_type]
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=step, atol=step)
    onnx.checker.check_model(result)


def test_nodes_that_share_an_input_share_its_cast_and_their_weight() -> None:
    model = dense(TensorProto.FLOAT, gemm=False)
    model.graph.node.append(helper.make_node("MatMul", ["x", "fc.weight"], ["y2"], "second"))
    result = bridge.quantize(model, activations="bfloat16")
    ops = [node.op_type for node in result.graph.node]
    assert ops == ["Cast", bridge._reading.OPERATOR, "Cast", bridge._reading.OPERATOR, "Cast"]
    assert len(result.graph.initializer) == 3
    assert [layer.name for layer in bridge.layers(result)] == ["mm", "second"]


def test_a_weight_that_others_read_stays() -> None:
    model = dense(HALF, gemm=False)
    model.graph.node.append(helper.make_node("Transpose", ["fc.weight"], ["t"]))
    result = bridge.quantize(model)
    assert "fc.weight" in [tensor.name for tensor in result.graph.initializer]
    assert len(result.graph.initializer) == 4


def test_what_quantize_leaves_alone() -> None:
    model = dense(HALF, gemm=False, k=33)
    assert bridge.quantize(model).SerializeToString() == model.SerializeToString()
    model = edited(dense(HALF, gemm=True), lambda nodes: attribute(nodes[0], "alpha", 2.0))
    assert bridge.quantize(model).SerializeToString() == model.SerializeToString()
    with pytest.raises(ValueError, match=r"Gemm 'mm' has alpha = 2\.0, expected 1"):
        bridge.quantize(model, ["fc.weight"])
    with pytest.raises(ValueError, match="Gemm 'mm' has transA = 1, expected 0"):
        bridge.quantize(edited(dense(HALF, gemm=True), lambda nodes: attribute(nodes[0], "transA", 1)), ["mm"])
    with pytest.raises(ValueError, match="names: got 'fd', expected a constant weight"):
        bridge.quantize(model, ["fd"])
    with pytest.raises(TypeError, match="names: got str"):
        bridge.quantize(model, "fc")


def test_quantize_names_the_weight_in_its_errors() -> None:
    model = dense(HALF, gemm=True)
    tensor = tensor_of(model, "fc.weight")
    tensor.raw_data = b"\x00\x7c" + tensor.raw_data[2:]
    with pytest.raises(ValueError, match=r"names: 'fc.weight': .*finite"):
        bridge.quantize(model)


def test_layers_that_replace() -> None:
    model = dense(HALF, gemm=True, c=(6,))
    layer = layer_of(6, 32)
    for name in ("fc.weight", "mm"):
        result = bridge.replace(model, {name: layer})
        node = result.graph.node[0]
        assert (node.name, node.input[5], len(result.graph.node)) == ("mm", "fc.c", 1)
        assert np.array_equal(bridge.load(result).canonical()[0], layer.canonical()[0])
    with pytest.raises(ValueError, match=r"layers: 'mm': got a layer \[5, 32\], expected \[6, 32\]"):
        bridge.replace(model, {"mm": layer_of(5, 32)})
    with pytest.raises(ValueError, match="layers: 'mm' has a bias, expected none"):
        bridge.replace(model, {"mm": layer_of(6, 32, bias=np.zeros(6, np.float32))})
    with pytest.raises(ValueError, match="layers: got 'nn', expected a constant weight"):
        bridge.replace(model, {"nn": layer})
    with pytest.raises(ValueError, match="'mm' is given twice"):
        bridge.replace(model, {"mm": layer, "fc.weight": layer})
    with pytest.raises(TypeError, match="layers: got list"):
        bridge.replace(model, [layer])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activations: got None, expected 'float16' or 'bfloat16': 'mm' is FLOAT"):
        bridge.replace(dense(TensorProto.FLOAT, gemm=True), {"mm": layer})
    with pytest.raises(ValueError, match="activations: got 'float32'"):
        bridge.replace(model, {"mm": layer}, activations="float32")  # type: ignore[arg-type]


def test_a_quantised_file_with_external_data(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    model = dense(HALF, gemm=True)
    expected = fp4linear.quantize(onnx.numpy_helper.to_array(tensor_of(model, "fc.weight")))
    onnx.save_model(model, path, save_as_external_data=True, location="m.data", size_threshold=0)
    result = bridge.quantize(path, ["mm"], method="max_abs")
    assert np.array_equal(bridge.load(result).canonical()[0], expected.b)
    assert all(tensor.data_location != TensorProto.EXTERNAL for tensor in result.graph.initializer)
