"""load_model: a model filled from an NVFP4 checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from fp4linear.files import Tensors, open_tensors
from fp4linear.files.converting import chosen
from fp4linear.files.formats.base import Asked, Parts
from fp4linear.files.formats.registry import find_layers
from fp4linear.files.loading import checked, fuse, read_layer

from ._progress import each
from .module import Fp4LinearModule
from .quantizing import replace_module

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Scales for activations and caches: a weight-only layer has no use for them.
ACTIVATION_SUFFIXES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")
_LAYER_SUFFIXES = (
    "weight", "weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale", "bias",
    "input_scale", "input_global_scale",
)  # fmt: skip
_TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


@dataclass
class LoadReport:
    """What load_model did. Names are the model's, unless they say otherwise."""

    layers: dict[str, str] = field(default_factory=dict)
    """Layer that is NVFP4 now -> the layers of the checkpoint that it came from."""
    dequantized: dict[str, str] = field(default_factory=dict)
    """Other parameter (an embedding, say) that got the float values of an NVFP4 layer -> that layer."""
    tensors: list[str] = field(default_factory=list)
    """Parameters and buffers that were filled as they are."""
    tied: dict[str, str] = field(default_factory=dict)
    """Parameter that the checkpoint lacks -> the one that it shares."""
    ignored: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that a weight-only model has no use for: scales of activations."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that the model has no place for."""
    left_on_meta: list[str] = field(default_factory=list)
    """Buffers that no checkpoint holds and that are on the meta device still."""

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} NVFP4 layers, {len(self.tensors)} other tensors"]
        for what in ("dequantized", "tied", "ignored", "missing", "unexpected", "left_on_meta"):
            if names := list(getattr(self, what)):
                shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
                lines.append(f"{what.replace('_', ' ')} ({len(names)}): {shown}")
        return "\n".join(lines)


@dataclass
class _Layer:
    """A layer of the model to be made, from rows of one checkpoint layer or from several whole ones."""

    name: str
    sources: list[str]
    parts: list[Parts]
    rows: slice | None = None


@dataclass
class _Value:
    """A tensor of the model to be filled, from rows of one checkpoint tensor or from several whole ones."""

    name: str
    sources: list[str]
    rows: slice | None = None


def load_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Mapping[str, Any] | Tensors,
    *,
    strict: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str] | None = None,
    fused: Mapping[str, Sequence[str]] = FUSED,
    tied: Mapping[str, str] | None = None,
    format: str | None = None,
    swizzled: bool | None = None,
    nibbles: Literal["low", "high"] | None = None,
    progress: bool = True,
    **options: Any,
) -> LoadReport:
    """Fill a model from an NVFP4 checkpoint: each nn.Linear that the checkpoint holds as NVFP4 becomes an
    Fp4LinearModule, everything else is loaded as it is.

    The tensors decide what is NVFP4, whatever exclude lists and configs say. Projections that are fused in the
    checkpoint and not in the model are split, and the other way round fused, every row keeping its own global scale.
    An NVFP4 weight for anything but an nn.Linear (an embedding) is dequantised. Everything is checked by name and shape
    before anything is changed.

    Args:
        model: any tree of modules, a Hugging Face model or not; on the meta device too.
        checkpoint: a .safetensors file, an index of shards, a directory with either, a mapping from names to NumPy
            arrays, or what `fp4linear.files.open_tensors` returned.
        strict: raise where a tensor is missing or has no place. Otherwise the report lists them.
        device: for the parts of the model that are on the meta device (by default cpu); others stay where they are.
        dtype: float type for tensors that were on the meta device; by default the checkpoint's. Others keep theirs.
        rename: from a tensor's name in the checkpoint to its name in the model, where they differ.
        fused: last part of a fused layer's name -> those of its parts, in the order of rows.
        tied: parameter -> the one that it shares where the checkpoint lacks it ("lm_head.weight":
            "model.embed_tokens.weight"). Parameters that are one object, and a model whose config has
            tie_word_embeddings, need no entry.
        format, swizzled, nibbles: as for `fp4linear.load`, for the layers that leave a doubt.
        progress: show a bar on stderr.
        options: nan_scales, path, isa, threads, batch_invariant, as for `fp4linear.Fp4Linear`.

    Returns:
        LoadReport.

    Raises:
        RuntimeError: names that are missing or unexpected, shapes that differ; the model is as it was.
        fp4linear.files.FormatError: a damaged file, or NVFP4 of a kind that can't be read.
        ValueError, TypeError: an unknown format or nibbles, a swizzled that is no bool.

    Example:
        >>> import numpy as np, torch, fp4linear
        >>> from fp4linear.torch import load_model
        >>> q = fp4linear.quantize(np.eye(4, 16, dtype=np.float32))
        >>> checkpoint = {"0.weight": q.b, "0.weight_scale": q.scales, "0.weight_scale_2": q.scale2}  # or a path
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 4, bias=False))
        >>> print(load_model(model, checkpoint, progress=False))
        1 NVFP4 layers, 0 other tensors
        >>> model(torch.ones(1, 16))
        tensor([[1., 1., 1., 1.]])
    """
    asked = checked(format, swizzled, nibbles)
    tensors = open_tensors(checkpoint)
    plan = _Plan(model, tensors, rename or (lambda name: name), fused, tied or {}, asked)
    plan.make()
    report = plan.report
    problems = list(plan.mismatched)
    if strict:
        problems += _listed("Missing", report.missing) + _listed("Unexpected", report.unexpected)
    if problems:
        text = "\n\t".join(problems)
        raise RuntimeError(f"Error(s) in loading {tensors.source} for {type(model).__name__}:\n\t{text}")
    fill = _Fill(model, tensors, torch.device(device or "cpu"), dtype, options)
    todos: list[_Layer | _Value] = [*plan.layers, *plan.values]
    for todo in each(todos, "Loading", progress):
        if isinstance(todo, _Layer):
            fill.layer(todo)
        else:
            fill.value(todo)
    for name, source in report.tied.items():
        fill.tie(name, source)
    report.left_on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    return report


def _listed(kind: str, names: list[str]) -> list[str]:
    return [f"{kind} key(s): {', '.join(map(repr, names))}."] if names else []


class _Plan:
    """Which tensor goes where; changes nothing."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Tensors,
        rename: Callable[[str], str],
        fused: Mapping[str, Sequence[str]],
        tied: Mapping[str, str],
        asked: Asked,
    ) -> None:
        self.model, self.tensors, self.fused, self.tied, self.asked = model, tensors, fused, tied, asked
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.report = LoadReport()
        self.layers: list[_Layer] = []
        self.values: list[_Value] = []
        self.mismatched: list[str] = []
        # By the names of the model. A layer is renamed by the name of its weight.
        self.quantized: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        of_layers: set[str] = set()
        self.formats = find_layers(tensors)
        for layer, found in self.formats.items():
            self.quantized[rename(layer + ".weight").removesuffix(".weight")] = layer
            of_layers.update(f"{layer}.{suffix}" for suffix in _LAYER_SUFFIXES)
            of_layers.update(found.tensors_of(tensors, layer))
        for name in tensors:
            if name.endswith(ACTIVATION_SUFFIXES):
                self.report.ignored.append(name)
            elif name not in of_layers:
                self.plain[rename(name)] = name
        self.taken: set[str] = set()  # layers and tensors of the checkpoint that have a place
        # By the identity of parameters, for those that several modules share.
        self.filled: dict[int, str] = {}
        self.replaced: dict[int, str] = {}

    def make(self) -> None:
        planned: set[int] = set()
        for name, module in self.modules.items():
            if self._layer(name, module, id(module) in planned):
                planned.add(id(module))
        for name, tensor in self._tensors_of_model(planned):
            self._value(name, tensor)
        self._ties()
        for layer in self.quantized.values():
            if layer not in self.taken:
                names = [f"{layer}.{suffix}" for suffix in _LAYER_SUFFIXES if f"{layer}.{suffix}" in self.tensors]
                self.report.unexpected += [name for name in names if name not in self.report.ignored] or [layer]
        self.report.unexpected += [name for name in self.plain.values() if name not in self.taken]

    def _origins(self, path: str) -> Iterator[tuple[list[str], tuple[int, int, int] | None]]:
        """Which modules of a checkpoint a module of the model may come from: itself, all parts of it, or a whole.

        With a whole come the rows that are the module's, and how many there must be: first, end, all.
        """
        yield [path], None
        parent, dot, last = path.rpartition(".")
        if parts := self.fused.get(last):
            yield [parent + dot + part for part in parts], None
        for whole, names in self.fused.items():
            if last in names:
                found = [getattr(self.modules.get(parent + dot + name), "out_features", None) for name in names]
                sizes = [size for size in found if isinstance(size, int)]
                if len(sizes) == len(names):
                    ends = list(accumulate(sizes))
                    place = list(names).index(last)
                    yield [parent + dot + whole], (ends[place] - sizes[place], ends[place], ends[-1])

    def _layer(self, name: str, module: nn.Module, again: bool) -> bool:
        """Plan the layer of a module; False where the checkpoint has no NVFP4 for it."""
        shape = _shape_of_weight(module)
        if shape is None:
            return False
        for origins, rows in self._origins(name):
            if not all(origin in self.quantized for origin in origins):
                continue
            sources = [self.quantized[origin] for origin in origins]
            self.taken.update(sources)
            if again:  # a module of two names
                return True
            parts = [self._read(source) for source in sources]
            n, k = sum(len(part.b) for part in parts), 2 * parts[0].b.shape[1]
            first, end, whole = rows or (0, n, n)
            text = " + ".join(sources)
            if [end - first, k] != shape or whole != n:
                self.mismatched.append(f"size mismatch for {name}: {text} is NVFP4 {[n, k]}, the model has {shape}")
                return True
            if _swappable(module):
                self.report.layers[name] = text
                self.replaced[id(module.weight if isinstance(module, nn.Linear) else module)] = name + ".weight"
            else:
                self.report.dequantized[name + ".weight"] = text
                self.filled[id(module.weight)] = name + ".weight"
            has_bias = any(part.bias is not None for part in parts)
            if getattr(module, "bias", None) is not None and not has_bias:
                self.report.missing.append(name + ".bias")
            elif getattr(module, "bias", None) is None and has_bias:
                biases = [source + ".bias" for source in sources]
                self.report.unexpected += [bias for bias in biases if bias not in self.report.unexpected]
            self.layers.append(_Layer(name, sources, parts, slice(first, end) if rows else None))
            return True
        return False

    def _read(self, source: str) -> Parts:
        _, said = chosen(self.tensors, source, self.formats[source], self.asked)
        return read_layer(self.tensors, source, said.format, swizzled=said.swizzled, nibbles=said.nibbles)

    def _tensors_of_model(self, planned: set[int]) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers under every name, but those of planned layers."""
        for path, module in self.modules.items():
            if id(module) in planned:
                continue
            prefix = path + "." if path else ""
            if isinstance(module, Fp4LinearModule):
                self.report.missing.append(prefix + "weight")
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    yield prefix + name, parameter
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield prefix + name, buffer

    def _value(self, name: str, tensor: Tensor) -> None:
        path, dot, last = name.rpartition(".")
        for origins, rows in self._origins(path):
            if not all(origin + dot + last in self.plain for origin in origins):
                continue
            sources = [self.plain[origin + dot + last] for origin in origins]
            self.taken.update(sources)
            shapes = [self.tensors.info(source).shape for source in sources]
            got = [sum(shape[0] for shape in shapes), *shapes[0][1:]] if shapes[0] else []
            first, end, whole = rows or ((0, got[0], got[0]) if got else (0, 0, 0))
            if (got and whole != got[0]) or [end - first, *got[1:]][: len(got)] != list(tensor.shape):
                text = " + ".join(sources)
                self.mismatched.append(f"size mismatch for {name}: {text} is {got}, the model has {list(tensor.shape)}")
            elif id(tensor) not in self.filled:
                self.values.append(_Value(name, sources, slice(first, end) if rows else None))
                self.report.tensors.append(name)
                self.filled[id(tensor)] = name
            return
        self.report.missing.append(name)

    def _ties(self) -> None:
        """Missing parameters that are another one's, or that the caller or the config says are."""
        pairs = dict(self.tied)
        if bool(getattr(getattr(self.model, "config", None), "tie_word_embeddings", False)):
            head, embedding = self._name_of("get_output_embeddings"), self._name_of("get_input_embeddings")
            if head and embedding:
                pairs.setdefault(head + ".weight", embedding + ".weight")
                pairs.setdefault(embedding + ".weight", head + ".weight")
        there = {*self.filled.values(), *self.replaced.values()}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name in list(self.report.missing):
            shared = id(parameters.get(name))
            source = self.filled.get(shared) or self.replaced.get(shared) or pairs.get(name)
            if source in there:
                self.report.missing.remove(name)
                self.report.tied[name] = str(source)

    def _name_of(self, getter: str) -> str | None:
        find = getattr(self.model, getter, None)
        wanted = find() if callable(find) else None
        names = (name for name, module in self.modules.items() if module is wanted)
        return next(names, None) if wanted is not None else None


class _Fill:
    """Puts values into a model."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Tensors,
        device: torch.device,
        dtype: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.tensors, self.device, self.dtype, self.options = model, tensors, device, dtype, options

    def layer(self, layer: _Layer) -> None:
        module = self.model.get_submodule(layer.name)
        parts = layer.parts[0] if len(layer.parts) == 1 else fuse(self.tensors, layer.sources, layer.parts)
        if layer.rows is not None:
            parts = _rows_of(parts, layer.rows)
        if not _swappable(module):
            from fp4linear import dequantize

            values = torch.from_numpy(dequantize(parts.b, parts.scales, parts.scale2))
            self._set(layer.name + ".weight", values)
            if parts.bias is not None and getattr(module, "bias", None) is not None:
                self._set(layer.name + ".bias", torch.from_numpy(parts.bias))
            return
        where = module.device if isinstance(module, Fp4LinearModule) else module.weight.device
        where = self.device if where.type == "meta" else where
        old, bias = module.bias, None
        if old is not None and parts.bias is not None:
            bias = torch.from_numpy(parts.bias).to(self.dtype or torch.float32 if old.is_meta else old.dtype)
        elif old is not None:  # missing, and not strict: what the model had
            bias = torch.zeros(len(parts.b)) if old.is_meta else old.detach()
        made = Fp4LinearModule.from_parts(parts.b, parts.scales, parts.scale2, bias, device=str(where), **self.options)
        made.train(module.training)
        replace_module(self.model, module, made)

    def value(self, value: _Value) -> None:
        arrays = [self._tensor(source) for source in value.sources]
        whole = arrays[0] if len(arrays) == 1 else torch.cat(arrays)
        self._set(value.name, whole if value.rows is None else whole[value.rows])

    def tie(self, name: str, source: str) -> None:
        path, _, last = source.rpartition(".")
        owner = self.model.get_submodule(path)
        if isinstance(owner, Fp4LinearModule):  # the model's embedding is the checkpoint's NVFP4 head
            self._set(name, owner.dequantize())
            return
        shared = owner._parameters[last]
        path, _, last = name.rpartition(".")
        self.model.get_submodule(path)._parameters[last] = shared

    def _get(self, name: str) -> Any:
        path, _, last = name.rpartition(".")
        return getattr(self.model.get_submodule(path), last)

    def _tensor(self, name: str) -> Tensor:
        raw = np.array(self.tensors.array(name))  # a copy: the file is mapped read-only
        dtype = self.tensors.info(name).dtype
        if dtype not in _TORCH_DTYPES:
            raise RuntimeError(f"{self.tensors.source}: tensor {name!r}: torch has no type for {dtype}")
        return torch.from_numpy(raw).view(_TORCH_DTYPES[dtype])

    def _set(self, name: str, values: Tensor) -> None:
        """Copy into a parameter or buffer; one on the meta device is made anew, under all of its names."""
        old = self._get(name)
        if not old.is_meta:
            with torch.no_grad():
                old.copy_(values)
            return
        values = values.to(self.device)
        if self.dtype is not None and values.is_floating_point():
            values = values.to(self.dtype)
        new: Any = nn.Parameter(values, old.requires_grad) if isinstance(old, nn.Parameter) else values
        for module in self.model.modules():
            for table in (module._parameters, module._buffers):
                for key, value in table.items():
                    if value is old:
                        table[key] = new


def _swappable(module: nn.Module) -> TypeGuard[nn.Linear | Fp4LinearModule]:
    """True for what becomes an Fp4LinearModule. Other code treats subclasses of nn.Linear specially."""
    return type(module) is nn.Linear or isinstance(module, Fp4LinearModule)


def _shape_of_weight(module: nn.Module) -> list[int] | None:
    """[N, K], or None for a module that has no weight."""
    if isinstance(module, Fp4LinearModule):
        return [module.out_features, module.in_features]
    weight = module._parameters.get("weight")
    return None if weight is None else list(weight.shape)


def _rows_of(parts: Parts, rows: slice) -> Parts:
    scale2 = parts.scale2 if parts.scale2.ndim == 0 else parts.scale2[rows]
    return Parts(parts.b[rows], parts.scales[rows], scale2, None if parts.bias is None else parts.bias[rows])
