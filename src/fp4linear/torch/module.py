"""Fp4LinearModule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from fp4linear import Fp4Linear, quantize
from fp4linear._quantize import Method

from ._layers import Holder, attach, host_bias, rebuild
from ._ops import linear, recording, unobserved

WEIGHT_NAMES = ("weight", "weight_scale", "weight_scale_2")
_DEVICES = ("cpu", "cuda", "meta")
_OPTIONS = (
    "block_size", "nan_scales", "path", "isa", "threads", "batch_invariant", "native", "input_scale",
    "input_global_scale",
)  # fmt: skip


class Fp4LinearModule(nn.Module):
    """y = x @ W.T + bias with W stored as NVFP4: nn.Linear for a model whose weights are quantised.

    The module holds one layer of the core (`layer`), whose weight never changes and lies in the form that its device's
    kernels want. So there is no `weight` parameter: `parameters()` gives the bias alone, and `buffers()` a tensor of
    two numbers by which compiled code finds the layer. `state_dict()` makes the canonical tensors when it is asked,
    under ModelOpt's names: `weight` uint8 [N, K/2], `weight_scale` float8_e4m3fn [N, ceil(K/block_size)],
    `weight_scale_2` float32, 0-d or [N], and `bias`.

    The bias is made with requires_grad=False. It is added in float32 before the one rounding, inside the kernel, so the
    core holds a copy: a change in place is noticed at the next call and makes the layer anew. Training it works and is
    slow. (Changes in place of `bias.data` go unnoticed.)

    A CUDA graph that you captured reads the layer that it captured: capture again after load_state_dict(), a move, or
    a change of the bias. (torch.compile's own graphs do that by themselves, but for the bias.)

    `.to()`, `.cuda()`, `.cpu()` make the layer there. Float types change the bias only, never the weight.
    Gradients flow to x and to the bias. Under autocast x is cast to its type.

    Args:
        in_features: K, even.
        out_features: N.
        bias: whether there is one.
        device: where the layer is to be: cpu, cuda or meta. By default torch's default device.
        dtype: type of the bias. By default torch's default type.
        options: block_size, nan_scales, path, isa, threads, batch_invariant, native, input_scale,
            input_global_scale, as for `fp4linear.Fp4Linear`.

    A module made this way has no weight before load_state_dict(). `from_parts`, `from_linear` and `from_layer` make
    whole ones.

    Raises:
        TypeError: an unknown option.
        ValueError: an odd in_features, or a number of features that is negative.

    Example:
        >>> import torch
        >>> from fp4linear.torch import Fp4LinearModule
        >>> module = Fp4LinearModule.from_linear(torch.nn.Linear(64, 32))
        >>> module(torch.ones(2, 64, dtype=torch.bfloat16)).shape
        torch.Size([2, 32])
        >>> {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        {'bias': (32,), 'weight': (32, 32), 'weight_scale': (32, 4), 'weight_scale_2': ()}
    """

    in_features: int
    out_features: int
    block_size: int
    bias: nn.Parameter | None
    _key: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if in_features < 0 or in_features % 2:
            raise ValueError(f"in_features: expected an even number (two codes share a byte), got {in_features}")
        if out_features < 0:
            raise ValueError(f"out_features: expected a number >= 0, got {out_features}")
        if unknown := set(options) - set(_OPTIONS):
            raise TypeError(f"options: expected some of {', '.join(_OPTIONS)}, got {', '.join(sorted(unknown))}")
        self.in_features, self.out_features = in_features, out_features
        self._options: dict[str, Any] | None = options  # None: the layer's
        where = torch.get_default_device() if device is None else torch.device(device)
        values = torch.zeros(out_features, device=where, dtype=dtype or torch.get_default_dtype()) if bias else None
        self._set_bias(values)
        self._install(None, _with_index(where))

    @classmethod
    def from_layer(cls, layer: Fp4Linear, *, bias_dtype: torch.dtype = torch.float32) -> Fp4LinearModule:
        """A module around a layer, which is not copied.

        Args:
            layer: any layer, on any device.
            bias_dtype: type of the module's bias. Where the values don't fit, the layer is made anew with the rounded
                ones at the first call.
        """
        values = layer.bias
        bias = None if values is None else torch.from_numpy(values).to(layer.device, bias_dtype)
        return cls._around(layer, bias, None)

    @classmethod
    def from_parts(cls, b: Any, scales: Any, scale2: Any, bias: Any = None, **options: Any) -> Fp4LinearModule:
        """A module from canonical arrays: the arguments and errors of `fp4linear.Fp4Linear`, device= included.

        A bias that is a tensor keeps its type in the module.
        """
        if isinstance(bias, Tensor):
            bias = bias.detach()
        if options.get("device") is not None:
            options["device"] = str(torch.device(options["device"]))
        layer = Fp4Linear(b, scales, scale2, bias if not isinstance(bias, Tensor) else host_bias(bias), **options)
        if isinstance(bias, Tensor):
            values: Tensor | None = bias.to(layer.device, copy=True)
        elif bias is None:
            values = None
        else:
            values = torch.from_numpy(np.zeros(0, np.float32) if layer.bias is None else layer.bias).to(layer.device)
        options.pop("device", None)
        return cls._around(layer, values, options)

    @classmethod
    def from_linear(cls, module: nn.Linear, *, method: Method = "max_abs", **options: Any) -> Fp4LinearModule:
        """A module with the quantised weight of an nn.Linear, on its device, in its training mode.

        Args:
            module: the nn.Linear, its weight float and finite, in_features even. It is left as it is.
            method: "max_abs", "four_over_six" or "mse", as for `fp4linear.quantize`.
            options: as for `fp4linear.Fp4Linear`.

        Raises:
            ValueError: an odd in_features, a value that is not finite.
            TypeError: a weight that is not float.
        """
        weight = module.weight.detach()
        options.setdefault("device", str(weight.device))
        made = cls.from_parts(*quantize(weight, method=method), module.bias, **options)
        made.train(module.training)
        return made

    @classmethod
    def _around(cls, layer: Fp4Linear, bias: Tensor | None, options: dict[str, Any] | None) -> Fp4LinearModule:
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module.in_features, module.out_features = layer.in_features, layer.out_features
        module._options = options
        module._set_bias(bias)
        module._install(layer, torch.device(layer.device))
        return module

    def _become(self, layer: Fp4Linear, device: torch.device) -> None:
        """Hold another layer, made anew on the device; the bias is the new layer's, of the type that it had."""
        self._options = self._layer_options()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        if self.bias is not None:
            values = torch.from_numpy(np.zeros(0, np.float32) if layer.bias is None else layer.bias)
            self._set_bias(values.to(device, self.bias.dtype))
        if str(device) != layer.device:
            layer = rebuild(layer, host_bias(self.bias), str(device))
        self._install(layer, device)

    def _set_bias(self, values: Tensor | None) -> None:
        self.register_parameter("bias", None if values is None else nn.Parameter(values, requires_grad=False))

    def _install(self, layer: Fp4Linear | None, device: torch.device) -> None:
        """Take a layer, whose bias is the module's. A new key, so that captured graphs see a change."""
        self._holder = Holder(layer)
        self.block_size = int((self._options or {}).get("block_size", 16)) if layer is None else layer.block_size
        if layer is not None and _equal(host_bias(self.bias), layer.bias):
            self._holder.made_with(self.bias)
        self.register_buffer("_key", attach(self._holder, device), persistent=False)

    def _make(self, weight: Mapping[str, Tensor], device: torch.device, options: Mapping[str, Any]) -> Fp4Linear:
        b, scales, scale2 = (weight[name] for name in WEIGHT_NAMES)
        return Fp4Linear(b, scales, scale2, host_bias(self.bias), device=str(device), **options)

    @property
    def layer(self) -> Fp4Linear:
        """The core's layer, with the present bias. RuntimeError where there is no weight yet."""
        return self._holder.current(self.bias)

    @property
    def device(self) -> torch.device:
        """Where the layer is."""
        return self._key.device

    def forward(self, x: Tensor) -> Tensor:
        """y = x @ W.T + bias.

        Args:
            x: [..., K] float16, bfloat16 or float32 (on a GPU only the 16-bit types, or under autocast), any strides.

        Returns:
            y [..., N] of x's type, or of autocast's: fresh and C-contiguous.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came.
            RuntimeError: there is no weight yet.
        """
        bias = self._parameters["bias"]  # without nn.Module.__getattr__
        if not is_compiling():
            holder = self._holder
            if holder.layer is not None and unobserved(x) and not recording(x, bias):
                return holder.current(bias).forward(x)
        y: Tensor = linear(x, self._buffers["_key"], bias, self.out_features, self.in_features)
        return y

    def dequantize(self) -> Tensor:
        """The weight as float32 [N, K] on the host: e2m1 * e4m3 * scale2, rounded once."""
        return torch.from_numpy(self.layer.dequantize())

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        if self.block_size != 16:
            text += f", block_size={self.block_size}"
        return text + f", device={str(self.device)!r}" + ("" if self._holder.layer is not None else ", no weight yet")

    # Devices and types

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp4LinearModule:
        # .to(), .cuda(), .half(), .to_empty(), .share_memory() all come here.
        key, address, holder = self._key, self._key.data_ptr(), self._holder
        device = fn(key).device
        if device.type not in _DEVICES:
            raise ValueError(f"device: expected cpu, cuda or meta, got {device}")
        super()._apply(fn, recurse)
        if device == key.device:
            if key.data_ptr() == address:
                self._buffers["_key"] = key  # whatever fn made of it
            else:  # exchanged in place
                self._install(holder.layer, device)
            return self
        layer = holder.layer
        try:
            if layer is not None:
                moved = device.type != "meta"
                self._options = self._layer_options()
                layer = rebuild(layer, host_bias(self.bias), str(device)) if moved else None
        except BaseException:
            self._buffers["_key"] = key
            raise
        self._install(layer, device)
        return self

    def _layer_options(self) -> dict[str, Any]:
        """The options to make a layer of the same kind with, from other bytes."""
        if self._options is not None:
            return self._options
        if self._holder.layer is None:
            return {}
        keywords = dict(self._holder.layer.__reduce__()[1][5])
        del keywords["device"]
        return keywords

    # State

    def _weight_tensors(self) -> dict[str, Tensor]:
        """The canonical tensors, on the module's device; empty where there is no weight."""
        if self.device.type == "meta":
            blocks = -(-self.in_features // self.block_size)
            n, half_k = self.out_features, self.in_features // 2
            with torch.device("meta"):
                made = (torch.empty(n, half_k, dtype=torch.uint8), torch.empty(n, blocks, dtype=torch.float8_e4m3fn),
                        torch.empty((), dtype=torch.float32))  # fmt: skip
            return dict(zip(WEIGHT_NAMES, made, strict=True))
        if self._holder.layer is None:
            return {}
        b, scales, scale2 = (torch.from_numpy(np.asarray(part)) for part in self._holder.layer.canonical())
        tensors = (b, scales.view(torch.float8_e4m3fn), scale2)
        return {name: tensor.to(self.device) for name, tensor in zip(WEIGHT_NAMES, tensors, strict=True)}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self._weight_tensors().items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # input_scale is ModelOpt's scale for activations: no part of a weight-only layer.
        ours = {prefix + name for name in (*WEIGHT_NAMES, "input_scale")}
        rest = {name: value for name, value in state_dict.items() if name.startswith(prefix) and name not in ours}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        given = {name: state_dict[prefix + name] for name in WEIGHT_NAMES if prefix + name in state_dict}
        missing = [prefix + name for name in WEIGHT_NAMES if name not in given]
        if missing:
            missing_keys.extend(missing)
            if given and not strict:
                error_msgs.append(f"{prefix[:-1]}: {', '.join(missing)} missing: a weight needs all three tensors")
            return
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        weight = given["weight"]
        device = _with_index(weight.device) if assign and isinstance(weight, Tensor) else self.device
        problems = self._problems_of(given)
        if device.type == "meta" and not problems:
            problems = ["the module is on the meta device: call load_state_dict(..., assign=True), or to_empty() first"]
        if problems:
            error_msgs.extend(f"{prefix}{problem}" for problem in problems)
            return
        try:
            options = self._layer_options()
            layer = self._make(given, device, options)
        except (TypeError, ValueError, BufferError) as error:
            error_msgs.append(f"{prefix[:-1]}: {error}")
            return
        self._options = options
        self._install(layer, device)

    def _problems_of(self, given: dict[str, Any]) -> list[str]:
        wanted = {
            "weight": ([self.out_features, self.in_features // 2], (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)),
            "weight_scale": (
                [self.out_features, -(-self.in_features // self.block_size)],
                (torch.float8_e4m3fn, torch.uint8),
            ),
        }
        problems = []
        for name, value in given.items():
            if not isinstance(value, Tensor):
                problems.append(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
            elif name in wanted:
                shape, dtypes = wanted[name]
                if list(value.shape) != shape or value.dtype not in dtypes:
                    is_float = value.dtype.is_floating_point
                    hint = " (quantize_model() makes such a module of float weights)" if is_float else ""
                    problems.append(
                        f"{name}: expected {dtypes[0]} {shape}, got {value.dtype} {list(value.shape)}{hint}"
                    )
            elif list(value.shape) not in ([], [1], [self.out_features]):
                problems.append(f"{name}: expected one factor or [{self.out_features}], got shape {list(value.shape)}")
        return problems

    def __getstate__(self) -> dict[str, Any]:
        # As tensors, so that torch.load's map_location says where the layer comes back. As bytes, because plain pickle
        # can't read float8 storages back.
        state = self._plain_state()
        weight = self._weight_tensors() if self.device.type != "meta" else {}
        state["_device"] = self.device
        state["_weight"] = {name: t.view(torch.uint8) if t.itemsize == 1 else t for name, t in weight.items()}
        state["_options"] = self._layer_options()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        device, weight = state.pop("_device"), state.pop("_weight")
        super().__setstate__(state)
        layer = None
        if weight:
            device = _with_index(weight["weight"].device)
            layer = self._make(weight, device, self._options or {})
        self._install(layer, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fp4LinearModule:
        # The core's layer never changes, so the copy shares it.
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self._plain_state(), memo))
        made._install(self._holder.layer, self.device)
        return made

    def _plain_state(self) -> dict[str, Any]:
        """The attributes without the layer and its key."""
        state = {name: value for name, value in self.__dict__.items() if name != "_holder"}
        state["_buffers"] = {name: value for name, value in self._buffers.items() if name != "_key"}
        return state


def _equal(a: Any, b: Any) -> bool:
    return a is b if a is None or b is None else bool(np.array_equal(a, b, equal_nan=True))


def _with_index(device: torch.device) -> torch.device:
    """cuda -> cuda:N, as tensors say it."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
