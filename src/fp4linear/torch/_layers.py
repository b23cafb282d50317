"""Which layer an op's `key` tensor stands for, and the bias that the layer holds.

A compiled graph must not hold a layer, a number of one, or a Python object: constants would be baked in, and thirty
equal blocks would compile thirty times. So every layer has a tensor of two numbers, its key, on its device, and ops
take that: they find the layer by the key's address, or by what is in it where the key was copied. Whatever follows the
addresses of static inputs (torch's CUDA graphs) then follows layers as well, and a layer lives for as long as its key
does, saved for a backward pass included.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp4linear import Fp4Linear

_by_address: dict[int, weakref.ref[Holder]] = {}
_by_serial: dict[int, weakref.ref[Holder]] = {}
_serials = itertools.count()
_PROCESS = secrets.randbits(62)  # a key of another process, from a file, is no key here
_NO_BIAS, _UNKNOWN = -1, -2  # in place of the address of a bias


class Holder:
    """A layer of the core, or None before a weight is there, with the bias that it was made with."""

    __slots__ = ("__weakref__", "_bias", "_lock", "_made", "key", "layer")

    def __init__(self, layer: Fp4Linear | None) -> None:
        self.layer = layer
        self.key: Tensor | None = None  # an alias of the key: its address stays ours while the holder lives
        self._bias: Tensor | None = None
        # Layer, address and version of the bias: replaced as one, since other threads call meanwhile.
        self._made = (layer, _UNKNOWN, 0)
        self._lock = threading.Lock()

    def made_with(self, bias: Tensor | None) -> None:
        """Note that the layer's bias is this tensor's present value."""
        # Held, so that no other tensor can come to lie at its address.
        self._bias = None if bias is None else bias.detach()
        address, version = (_NO_BIAS, 0) if bias is None else (bias.data_ptr(), _version(bias))
        self._made = (self.layer, address, version)

    def current(self, bias: Tensor | None) -> Fp4Linear:
        """The layer with this bias: made again where the tensor or its value is another than last time."""
        layer, address, version = self._made
        if bias is None:
            if address != _NO_BIAS:
                layer = self._take(None)
        elif bias.data_ptr() != address or _version(bias) != version:
            layer = self._take(bias)
        if layer is None:
            raise RuntimeError(
                "the layer has no weight yet: load a state_dict with weight, weight_scale and weight_scale_2"
            )
        return layer

    def _take(self, bias: Tensor | None) -> Fp4Linear | None:
        with self._lock:
            if self.layer is not None:
                wanted, has = host_bias(bias), self.layer.bias
                same = wanted is has if wanted is None or has is None else np.array_equal(wanted, has, equal_nan=True)
                if not same:
                    self.layer = rebuild(self.layer, wanted, self.layer.device)
            self.made_with(bias)
            return self.layer


def attach(holder: Holder, device: torch.device) -> Tensor:
    """A new key of the holder on the device."""
    serial = next(_serials)
    with torch.inference_mode(False):  # an inference tensor could not be saved for a backward pass
        key = torch.tensor([_PROCESS, serial], dtype=torch.int64, device=device)
    holder.key = key.detach()
    key.__dict__["_fp4linear_holder"] = holder  # autograd saves keys: the layer then outlives its module
    _keep(_by_serial, serial, holder)
    if device.type != "meta":
        _keep(_by_address, key.data_ptr(), holder)
    return key


def holder_of(key: Tensor) -> Holder:
    """The holder that `attach` gave this key, or a copy of the key. RuntimeError where the layer is gone."""
    address = key.data_ptr()
    ref = _by_address.get(address)
    holder = ref() if ref is not None else None
    # The second comparison fails where the key's storage was exchanged in place, as share_memory_() does.
    if holder is not None and holder.key is not None and holder.key.data_ptr() == address:
        return holder
    return _holder_by_serial(key)


def _holder_by_serial(key: Tensor) -> Holder:
    if key.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("key: a copy of a layer's key can't be read while a CUDA graph captures")
    words: list[int] = key.tolist() if key.dtype == torch.int64 and key.numel() == 2 else [-1, -1]
    ref = _by_serial.get(words[1]) if words[0] == _PROCESS else None
    holder = ref() if ref is not None else None
    if holder is None:
        raise RuntimeError(
            "key: no layer of this process has this key. The layer is gone, or the key came from elsewhere (an "
            "exported program can't carry the layer)"
        )
    return holder


def _keep(table: dict[int, weakref.ref[Holder]], number: int, holder: Holder) -> None:
    def forget(ref: weakref.ref[Holder]) -> None:
        if table.get(number) is ref:  # else another key has come to this address
            del table[number]

    table[number] = weakref.ref(holder, forget)


def rebuild(layer: Fp4Linear, bias: Any, device: str) -> Fp4Linear:
    """The layer with another bias (float32 [N] or None), or on another device: same bytes, same options."""
    _, (cls, b, scales, scale2, _, keywords), *_ = layer.__reduce__()
    made: Fp4Linear = cls(b, scales, scale2, bias, **{**keywords, "device": device})
    return made


def host_bias(bias: Tensor | None) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """The bias as the core takes it: float32 on the host; None for none and for one of no values."""
    if bias is None or bias.numel() == 0:
        return None
    values: np.ndarray[Any, np.dtype[np.float32]] = bias.detach().to("cpu", torch.float32).contiguous().numpy()
    return values


def _version(tensor: Tensor) -> int:
    # An inference tensor counts no versions: only a new tensor is noticed.
    return -1 if tensor.is_inference() else tensor._version
