"""NVFP4 checkpoints from one format to another, bit for bit, one layer in memory at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from .checkpoint import Tensors, open_tensors
from .dtypes import BITS, Array
from .errors import FormatError
from .formats.base import Asked, Format
from .formats.marks import HEADER_MARK, TENSOR_MARK
from .formats.registry import SUPPORTED, find_layers
from .loading import Source, checked, problem_of
from .saving import Spec, write_safetensors
from .writers import WRITERS, CompressedTensorsWriter, Writer

OLD_MARKS = ("hf_quant_config", "quantization_config", "tensor_names", HEADER_MARK)
SHOWN_PROBLEMS = 3


@dataclass(frozen=True)
class ConvertedLayer:
    """One layer of the output. rounded: its global scale was rounded, which only happens where it was allowed."""

    name: str
    source: str
    source_format: str
    out_features: int
    in_features: int
    rounded: bool = False


@dataclass(frozen=True)
class _Layer:
    source: str
    found: Format
    asked: Asked
    shape: tuple[int, int]


def convert_file(
    source: Source,
    destination: str | os.PathLike[str],
    to: str,
    *,
    format: str | None = None,
    swizzled: bool | None = None,
    nibbles: Literal["low", "high"] | None = None,
    rounding: bool = False,
    force: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> list[ConvertedLayer]:
    """Writes all NVFP4 layers of a checkpoint in another format; other tensors are copied unchanged.

    Weights keep every bit: what the target can't hold is an error. Experts of a stack become layers of their own
    (`a.experts.up[3]` is `a.experts.3.up`). The activations' global scale goes along under the target's name.

    Args:
        source: what `load` takes: a file, an index, a directory, or a mapping of arrays.
        destination: the .safetensors file to make. It appears when it is complete.
        to: "modelopt", "compressed-tensors", "comfyui" or "torchao".
        format, swizzled, nibbles: as for `load`, for the layers that leave a doubt.
        rounding: allow the nearest divisor where compressed-tensors has none for a global scale.
        force: replace an existing file.
        progress: called with a tensor's or layer's name and its bytes in the source, after each.

    Raises:
        FormatError: a damaged source, a layer that can't be read, or one that the target can't hold.
        ValueError: an unknown format, or no NVFP4 layer in the source.
        FileExistsError: destination exists and force is False.

    Example:
        >>> import numpy as np, os, tempfile, fp4linear
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> tensors = {"up.weight": q.b, "up.weight_scale": q.scales, "up.weight_scale_2": q.scale2}
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "out.safetensors")
        >>> fp4linear.files.convert_file(tensors, path, "torchao")[0].source_format
        'modelopt'
        >>> fp4linear.files.layers(path)[0].format
        'torchao'
    """
    if to not in WRITERS:
        raise ValueError(f"to: got {to!r}, expected one of {', '.join(WRITERS)}")
    asked = checked(format, swizzled, nibbles)
    tensors = open_tensors(source)
    path = Path(destination)
    if path.exists() and not force:
        raise FileExistsError(f"{path}: exists already (--force or force=True replaces it)")
    writer = CompressedTensorsWriter(rounding=rounding) if to == CompressedTensorsWriter.name else WRITERS[to]()
    layers = choose_layers(tensors, asked, keeps_awq=to == "modelopt")
    if not layers:
        raise ValueError(f"{tensors.source}: there is no NVFP4 layer to convert")
    plan = _Plan(tensors, writer, layers)
    names = {target: layer.shape for target, layer in plan.layers.items()}
    others = [name for name in plan.specs if name not in plan.of_layers]
    metadata = {key: value for key, value in tensors.metadata(next(iter(tensors))).items() if not is_mark(key, value)}
    metadata |= writer.metadata(names, others)
    write_safetensors(path, plan.specs, plan.arrays(progress), metadata)
    rounded = set(writer.rounded) if isinstance(writer, CompressedTensorsWriter) else set()
    return [
        ConvertedLayer(target, layer.source, layer.found.name, *layer.shape, rounded=target in rounded)
        for target, layer in plan.layers.items()
    ]


def choose_layers(tensors: Tensors, asked: Asked, *, keeps_awq: bool) -> list[_Layer]:
    """Every layer with its format. FormatError where one can't be read."""
    layers, problems = [], []
    for name, claimed in find_layers(tensors).items():
        found, said = chosen(tensors, name, claimed, asked)
        problem = problem_of(tensors, name, found, said, awq=keeps_awq)
        shape = found.shape(tensors, name) if problem is None else None
        if shape is None:
            problems.append(f"layer {name!r} ({found.name}): {problem}")
        else:
            layers.append(_Layer(name, found, said, shape))
    if problems:
        more = f" (and {len(problems) - SHOWN_PROBLEMS} more)" if len(problems) > SHOWN_PROBLEMS else ""
        raise FormatError(f"{tensors.source}: {'; '.join(problems[:SHOWN_PROBLEMS])}{more}")
    return layers


def chosen(tensors: Tensors, layer: str, claimed: Format, asked: Asked) -> tuple[Format, Asked]:
    """The format to read a layer with, and the part of what the caller said that concerns it."""
    wanted = SUPPORTED.get(asked.format or "")
    found = wanted if wanted is not None and wanted.accepts(tensors, layer) else claimed
    return found, Asked(
        asked.format if found is wanted else None,
        asked.swizzled if "swizzled" in found.options else None,
        asked.nibbles if "nibbles" in found.options else None,
    )


def is_mark(key: str, value: str) -> bool:
    """Header metadata that belongs to the source's format."""
    return key in OLD_MARKS or value.startswith('{"_type"')


def target_name(base: str, expert: int | None) -> str:
    """Experts of a stack as exporters name single ones: the number before the last part of the name."""
    if expert is None:
        return base
    parent, dot, last = base.rpartition(".")
    return f"{parent}{dot}{expert}.{last}" if dot else f"{base}.{expert}"


class _Plan:
    """What the output holds, and where it comes from."""

    def __init__(self, tensors: Tensors, writer: Writer, layers: list[_Layer]) -> None:
        self.tensors, self.writer = tensors, writer
        self.layers: dict[str, _Layer] = {}
        self.specs: dict[str, Spec] = {}
        self.of_layers: set[str] = set()
        self.input_scales: dict[str, tuple[str, bool]] = {}  # source tensor -> target tensor, whether to invert
        consumed: set[str] = set()
        for layer in layers:
            target = target_name(*layer.found.place_of(tensors, layer.source))
            self.layers[target] = layer
            specs = writer.specs(target, *layer.shape)
            consumed.update(layer.found.tensors_of(tensors, layer.source))
            consumed.add(layer.source + TENSOR_MARK)  # whatever the layer was read as, it is no longer what this says
            own = layer.source + ".bias"
            padded = own in tensors and tensors.info(own).shape != layer.shape[:1]
            if padded:
                consumed.add(own)
            if padded or (target != layer.source and self._has_stack_bias(layer)):
                specs[target + ".bias"] = ("F32", layer.shape[:1])
            if self._awq(layer):
                specs[target + ".pre_quant_scale"] = ("F32", layer.shape[1:])
            self._add(specs)
            self.of_layers.update(specs)
            self._plan_input_scale(target, layer)
        self.copied = [name for name in tensors if name not in consumed and name not in self.input_scales]
        for name in self.copied:
            info = tensors.info(name)
            if info.dtype not in BITS:
                raise FormatError(f"{tensors.source}: tensor {name!r}: {info.dtype}, which safetensors can't hold")
            self._add({name: (info.dtype, info.shape)})

    def arrays(self, progress: Callable[[str, int], None] | None) -> Iterator[tuple[str, Array]]:
        """Every tensor of the output, one layer at a time."""
        counted: set[str] = set()
        for target, layer in self.layers.items():
            parts = layer.found.read(self.tensors, layer.source, layer.asked)
            if (parts.b.shape[0], 2 * parts.b.shape[1]) != layer.shape:
                raise FormatError(f"{self.tensors.source}: layer {layer.source!r}: shape {parts.b.shape} changed")
            yield from self.writer.arrays(target, parts)
            if target + ".bias" in self.of_layers and parts.bias is not None:
                yield target + ".bias", parts.bias
            if parts.pre_quant_scale is not None:
                yield target + ".pre_quant_scale", parts.pre_quant_scale
            if progress is not None:
                names = [n for n in layer.found.tensors_of(self.tensors, layer.source) if n not in counted]
                counted.update(names)
                progress(target, sum(self.tensors.info(name).nbytes for name in names))
        for name, (target, invert) in self.input_scales.items():
            yield target, self._input_scale(name, invert)
            if progress is not None:
                progress(name, self.tensors.info(name).nbytes)
        for name in self.copied:
            yield name, self.tensors.array(name)
            if progress is not None:
                progress(name, self.tensors.info(name).nbytes)

    def _add(self, specs: dict[str, Spec]) -> None:
        if twice := self.specs.keys() & specs.keys():
            raise FormatError(f"{self.tensors.source}: the output would hold tensor {min(twice)!r} twice")
        self.specs |= specs

    def _has_stack_bias(self, layer: _Layer) -> bool:
        base, _ = layer.found.place_of(self.tensors, layer.source)
        return any(base + suffix in self.tensors for suffix in (".bias", "_bias"))

    def _awq(self, layer: _Layer) -> bool:
        names = layer.found.tensors_of(self.tensors, layer.source)
        return any(name.endswith("pre_quant_scale") for name in names)

    def _plan_input_scale(self, target: str, layer: _Layer) -> None:
        old, new = layer.found.input_scale, self.writer.input_scale
        if old is None or new is None or layer.source + old[0] not in self.tensors or target != layer.source:
            return
        name = layer.source + old[0]
        if self.tensors.info(name).dtype not in ("F16", "BF16", "F32"):
            raise FormatError(f"{self.tensors.source}: tensor {name!r}: dtype {self.tensors.info(name).dtype}")
        self.input_scales[name] = (target + new[0], old[1] != new[1])
        self._add({target + new[0]: ("F32", self.tensors.info(name).shape)})

    def _input_scale(self, name: str, invert: bool) -> Array:
        values = self.tensors.floats(name)
        if not invert:
            return values
        with np.errstate(divide="ignore", over="ignore"):
            inverse = (1.0 / values.astype(np.float64)).astype(np.float32)
        if not np.isfinite(inverse).all():
            raise FormatError(f"{self.tensors.source}: tensor {name!r} holds values without a finite reciprocal")
        return np.asarray(inverse)
