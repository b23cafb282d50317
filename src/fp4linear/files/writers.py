"""The formats that can be written: a layer's tensors and the marks of the file, one class a format."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from .dtypes import Array
from .errors import FormatError
from .formats.base import Parts, padded_scale_shape, swap_nibbles
from .formats.comfyui import ComfyUI
from .formats.compressed_tensors import CompressedTensors, reciprocal
from .formats.marks import HEADER_MARK
from .formats.modelopt import ModelOpt
from .formats.torchao import TorchAO
from .saving import Spec, modelopt_arrays, modelopt_metadata, modelopt_specs


class Writer(ABC):
    """Tensors for layers [N, K] of one format; the header's metadata for all of them."""

    name: str
    input_scale: tuple[str, bool] | None

    @abstractmethod
    def specs(self, layer: str, n: int, k: int) -> dict[str, Spec]: ...

    @abstractmethod
    def arrays(self, layer: str, parts: Parts) -> Iterator[tuple[str, Array]]:
        """The arrays that go with `specs`. FormatError where the format can't hold the layer as it is."""

    @abstractmethod
    def metadata(self, layers: Mapping[str, tuple[int, int]], others: Iterable[str]) -> dict[str, str]:
        """layers: (N, K) of each; others: the names of the tensors that are copied."""


class ModelOptWriter(Writer):
    name = ModelOpt.name
    input_scale = ModelOpt.input_scale

    def specs(self, layer: str, n: int, k: int) -> dict[str, Spec]:
        return modelopt_specs(layer, n, k)

    def arrays(self, layer: str, parts: Parts) -> Iterator[tuple[str, Array]]:
        yield from modelopt_arrays(layer, parts.b, parts.scales, one_factor(layer, parts))

    def metadata(self, layers: Mapping[str, tuple[int, int]], others: Iterable[str]) -> dict[str, str]:
        return modelopt_metadata()


class CompressedTensorsWriter(Writer):
    name = CompressedTensors.name
    input_scale = CompressedTensors.input_scale

    def __init__(self, *, rounding: bool = False) -> None:
        self.rounding = rounding
        self.rounded: list[str] = []

    def specs(self, layer: str, n: int, k: int) -> dict[str, Spec]:
        return {
            layer + ".weight_packed": ("U8", (n, k // 2)),
            layer + ".weight_scale": ("F8_E4M3", (n, -(-k // 16))),
            layer + ".weight_global_scale": ("F32", (1,)),
        }

    def arrays(self, layer: str, parts: Parts) -> Iterator[tuple[str, Array]]:
        divisor, exact = divisor_of(layer, one_factor(layer, parts))
        if not exact:
            if not self.rounding:
                raise FormatError(
                    f"layer {layer!r}: compressed-tensors divides by its global scale, and no float32 number has the "
                    f"reciprocal {float(parts.scale2):.9g}: allow rounding (at most 2^-23 of the weight) or keep a "
                    "format that multiplies"
                )
            self.rounded.append(layer)
        yield layer + ".weight_packed", parts.b
        yield layer + ".weight_scale", parts.scales
        yield layer + ".weight_global_scale", divisor.reshape(1)

    def metadata(self, layers: Mapping[str, tuple[int, int]], others: Iterable[str]) -> dict[str, str]:
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        return {"format": "pt", "quantization_config": json.dumps(config)}


class ComfyUIWriter(Writer):
    name = ComfyUI.name
    input_scale = ComfyUI.input_scale

    def specs(self, layer: str, n: int, k: int) -> dict[str, Spec]:
        rows, half = padded(n, k)
        return {
            layer + ".weight": ("U8", (rows, half)),
            layer + ".weight_scale": ("F8_E4M3", padded_scale_shape(rows, half)),
            layer + ".weight_scale_2": ("F32", ()),
            layer + ".comfy_quant": ("U8", (len(comfy_mark(n, k)),)),
        }

    def arrays(self, layer: str, parts: Parts) -> Iterator[tuple[str, Array]]:
        from fp4linear import _core

        n, k = parts.b.shape[0], 2 * parts.b.shape[1]
        rows, half = padded(n, k)
        codes = np.zeros((rows, half), np.uint8)
        codes[:n, : k // 2] = swap_nibbles(parts.b)
        scales = np.zeros((rows, half // 8), np.uint8)
        scales[:n, : parts.scales.shape[1]] = parts.scales
        yield layer + ".weight", codes
        yield layer + ".weight_scale", np.asarray(_core.swizzle_scales(scales)).reshape(padded_scale_shape(rows, half))
        yield layer + ".weight_scale_2", one_factor(layer, parts)
        yield layer + ".comfy_quant", np.frombuffer(comfy_mark(n, k), np.uint8)

    def metadata(self, layers: Mapping[str, tuple[int, int]], others: Iterable[str]) -> dict[str, str]:
        entries = {name: json.loads(comfy_mark(n, k)) for name, (n, k) in layers.items()}
        return {"format": "pt", HEADER_MARK: json.dumps({"format_version": "1.0", "layers": entries})}


class TorchAOWriter(Writer):
    name = TorchAO.name
    input_scale = TorchAO.input_scale

    def specs(self, layer: str, n: int, k: int) -> dict[str, Spec]:
        if k % 16:
            raise FormatError(f"layer {layer!r}: in_features {k}, torchao's tensors hold multiples of 16")
        return {
            layer + "._weight_qdata": ("U8", (n, k // 2)),
            layer + "._weight_scale": ("F8_E4M3", (n, k // 16)),
            layer + "._weight_per_tensor_scale": ("F32", ()),
        }

    def arrays(self, layer: str, parts: Parts) -> Iterator[tuple[str, Array]]:
        yield layer + "._weight_qdata", parts.b
        yield layer + "._weight_scale", parts.scales
        yield layer + "._weight_per_tensor_scale", one_factor(layer, parts)

    def metadata(self, layers: Mapping[str, tuple[int, int]], others: Iterable[str]) -> dict[str, str]:
        tensor = {
            "_type": "NVFP4Tensor",
            "_data": {
                "is_swizzled_scales": False,
                "use_triton_kernel": False,
                "act_quant_kwargs": None,
                "block_size": 16,
                "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
            },
        }
        rest = list(others)
        result = {name: json.dumps({"_type": "Tensor"}) for name in rest}
        for name in layers:
            data = ["qdata", "scale", "per_tensor_scale"]
            if name + "._weight_act_per_tensor_scale" in result:
                del result[name + "._weight_act_per_tensor_scale"]
                data.append("act_per_tensor_scale")
            result[name + ".weight"] = json.dumps({**tensor, "_tensor_data_names": data})
        return {"format": "pt", "tensor_names": json.dumps(list(result)), **result}


WRITERS: dict[str, type[Writer]] = {
    writer.name: writer for writer in (ModelOptWriter, CompressedTensorsWriter, ComfyUIWriter, TorchAOWriter)
}


def one_factor(layer: str, parts: Parts) -> npt.NDArray[np.float32]:
    """scale2 as one number. FormatError for one a row, which no written format holds."""
    values = parts.scale2.reshape(-1)
    if values.size != 1 and len(set(values.tolist())) != 1:
        raise FormatError(f"layer {layer!r}: {values.size} global factors, one a row: files hold one a layer")
    return np.asarray(values[0], np.float32).reshape(())


def divisor_of(layer: str, scale2: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], bool]:
    """The float32 number whose reciprocal is scale2, and whether it is so exactly."""
    with np.errstate(divide="ignore", over="ignore"):
        nearest = reciprocal(scale2)
        candidates = [nearest, np.nextafter(nearest, np.float32(np.inf)), np.nextafter(nearest, np.float32(-np.inf))]
        for candidate in candidates:
            divisor = np.asarray(candidate, np.float32)
            if np.isfinite(divisor) and reciprocal(divisor) == scale2:
                return divisor, True
    if not np.isfinite(nearest) or nearest == 0:
        raise FormatError(f"layer {layer!r}: global factor {float(scale2):g} has no finite reciprocal to divide by")
    return nearest, False


def padded(n: int, k: int) -> tuple[int, int]:
    """The shape of ComfyUI's packed weight: rows and columns to multiples of 16."""
    return -(-n // 16) * 16, -(-k // 16) * 8


def comfy_mark(n: int, k: int) -> bytes:
    """X.comfy_quant. The original shape goes with it where there is padding, so that nothing is lost."""
    mark: dict[str, object] = {"format": "nvfp4"}
    if padded(n, k) != (n, k // 2):
        mark["orig_shape"] = [n, k]
    return json.dumps(mark).encode()
