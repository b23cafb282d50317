"""Tensor parallelism: ColumnParallel and RowParallel for torch.distributed.tensor.parallel.parallelize_module.

Every rank cuts its share out of the canonical bytes, so no weight is decoded, rounded or sent. What has to move between
ranks is activations, and DTensor moves them, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from fp4linear import Fp4Linear

from .module import Fp4LinearModule

_Array = np.ndarray[Any, Any]
PADDED_TO = 64  # values of K: what the fastest GPU kernel reads as one unit


class ColumnParallel(ParallelStyle):
    """Every rank has a share of the output features: y is sharded over its last axis.

    N is split as torch.chunk does it, anywhere.

    Args:
        input_layouts: how x comes: Replicate(), or Shard(d) where it is to be gathered first.
        output_layouts: how y goes: Shard(-1), or another placement that it is redistributed to.
        use_local_output: y is a plain tensor, the rank's share; otherwise a DTensor.
        parts: rows of the parts of a fused layer (qkv, gate_up), each of which is split for itself: a rank has its
            share of q, of k and of v. y must stay the local tensor then.

    Raises:
        ValueError: parts with a y that is not local; from parallelize_module, parts that do not add up to N, or a
            mesh of several dimensions.
        TypeError: from parallelize_module, a module that is no Fp4LinearModule.

    For instance::

        parallelize_module(block.mlp, mesh, {"up_proj": ColumnParallel(), "down_proj": RowParallel()})
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        parts: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.input_layout = input_layouts or Replicate()
        self.output_layout = output_layouts or Shard(-1)
        self.use_local_output = use_local_output
        self.parts = parts
        if parts is not None and not (use_local_output and self.output_layout == Shard(-1)):
            raise ValueError("parts: the shares of fused parts aren't a slice of y: y must stay local, Shard(-1)")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _whole_layer(module, device_mesh)
        n, rank, world = layer.out_features, device_mesh.get_local_rank(), device_mesh.size()
        parts = [n] if self.parts is None else list(self.parts)
        if sum(parts) != n:
            raise ValueError(f"parts: got {parts}, which sum to {sum(parts)}, expected {n}, the layer's out_features")
        rows, first = [], 0
        for part in parts:
            rows.append(np.arange(first, first + part)[_share(part, rank, world)])
            first += part
        _become(module, column_shard(layer, np.concatenate(rows)), device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: (self._input(inputs[0], device_mesh), *inputs[1:]))
        module.register_forward_hook(lambda _, inputs, y: self._output(y, device_mesh, n))
        return module

    def _input(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        if not isinstance(x, DTensor):
            if self.input_layout == Replicate() and not (x.requires_grad and torch.is_grad_enabled()):
                return x
            x = DTensor.from_local(x, mesh, (self.input_layout,), run_check=False)
        if tuple(x.placements) != (Replicate(),):
            x = x.redistribute(placements=(Replicate(),))
        # Each rank's gradient is that of its own columns: their sum is the gradient of x.
        local: Tensor = x.to_local(grad_placements=(Partial(),))
        return local

    def _output(self, y: Tensor, mesh: DeviceMesh, out_features: int) -> Tensor:
        if self.use_local_output and self.output_layout == Shard(-1):
            return y
        shape, stride = _whole_shape(y, out_features)
        whole = DTensor.from_local(y, mesh, (Shard(y.dim() - 1),), run_check=False, shape=shape, stride=stride)
        return _delivered(whole, self.output_layout, self.use_local_output)


class RowParallel(ParallelStyle):
    """Every rank has a share of the input features: the ranks' results are summed.

    K is split as torch.chunk does it, anywhere. Where a share does not start at a block of scales, its first block is
    filled up with zeros, which add nothing: the products are the same, and x is copied into a padded tensor. The bias
    stays with the first rank; the others hold zeros. Each rank rounds its sum to x's type before the ranks are added.

    Args:
        input_layouts: how x comes: Shard(-1), or another placement that it is redistributed from.
        output_layouts: how y goes: Replicate() (an all-reduce), or Shard(d) (a reduce-scatter).
        use_local_output: y is a plain tensor; otherwise a DTensor.

    Raises:
        TypeError, ValueError: from parallelize_module, as for `ColumnParallel`; in a call, an x of another width than
            the rank's share.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layout = input_layouts or Shard(-1)
        self.output_layout = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _whole_layer(module, device_mesh)
        shard = row_shard(layer, device_mesh.get_local_rank(), device_mesh.size())
        _become(module, shard.layer, device_mesh)
        k = layer.in_features
        module.register_forward_pre_hook(lambda _, inputs: (self._input(inputs[0], device_mesh, shard, k), *inputs[1:]))
        module.register_forward_hook(lambda _, inputs, y: self._output(y, device_mesh))
        return module

    def _input(self, x: Tensor, mesh: DeviceMesh, shard: RowShard, in_features: int) -> Tensor:
        if not isinstance(x, DTensor) and self.input_layout != Shard(-1):
            x = DTensor.from_local(x, mesh, (self.input_layout,), run_check=False)
        if isinstance(x, DTensor):
            if tuple(x.placements) != (Shard(x.dim() - 1),):
                x = x.redistribute(placements=(Shard(x.dim() - 1),))
            x = x.to_local()
        if x.shape[-1] != shard.in_features:
            raise ValueError(
                f"x: expected shape [..., {shard.in_features}], this rank's share of {in_features} features, "
                f"got {list(x.shape)}"
            )
        return F.pad(x, (shard.left, shard.right)) if shard.left or shard.right else x

    def _output(self, y: Tensor, mesh: DeviceMesh) -> Tensor:
        return _delivered(
            DTensor.from_local(y, mesh, (Partial(),), run_check=False), self.output_layout, self.use_local_output
        )


class RowShard(NamedTuple):
    """A rank's share of K: it takes x of in_features, with zeros before and after."""

    layer: Fp4Linear
    in_features: int
    left: int
    right: int


def column_shard(layer: Fp4Linear, rows: _Array) -> Fp4Linear:
    """The layer of some rows of W, on the host."""
    _, (cls, b, scales, scale2, bias, keywords), *_ = layer.__reduce__()
    factor = scale2 if scale2.ndim == 0 else scale2[rows]
    made: Fp4Linear = cls(
        b[rows], scales[rows], factor, None if bias is None else bias[rows], **{**keywords, "device": "cpu"}
    )
    return made


def row_shard(layer: Fp4Linear, rank: int, world: int) -> RowShard:
    """The layer of a rank's columns of W, on the host."""
    _, (cls, b, scales, scale2, bias, keywords), *_ = layer.__reduce__()
    n, k, block = layer.out_features, layer.in_features, layer.block_size
    share = _share(k, rank, world)
    first, end = share.start, share.stop
    size = -(-k // world)
    if size % 2 == 0 and size % block == 0:
        left = right = 0
        b, scales = b[:, first // 2 : -(-end // 2)], scales[:, first // block : -(-end // block)]
    else:
        left = first % block
        right = -(left + end - first) % PADDED_TO
        codes = np.zeros((n, left + end - first + right), np.uint8)
        covering = b[:, first // 2 : -(-end // 2)]  # whole bytes, whose first or last code may be a neighbour's
        unpacked = np.stack([covering & 15, covering >> 4], axis=-1).reshape(n, 2 * covering.shape[1])
        codes[:, left : left + end - first] = unpacked[:, first % 2 : first % 2 + end - first]
        b = codes[:, 0::2] | codes[:, 1::2] << 4
        needed = scales[:, (first - left) // block : -(-end // block)]
        scales = np.zeros((n, -(-codes.shape[1] // block)), np.uint8)
        scales[:, : needed.shape[1]] = needed
    if bias is not None and rank != 0:
        bias = np.zeros_like(bias)
    made: Fp4Linear = cls(
        np.ascontiguousarray(b), np.ascontiguousarray(scales), scale2, bias, **{**keywords, "device": "cpu"}
    )
    return RowShard(made, end - first, left, right)


def _share(size: int, rank: int, world: int) -> slice:
    """A rank's part of an axis, as torch.chunk and DTensor cut it: the last ranks may have less, or nothing."""
    step = -(-size // world)
    return slice(min(rank * step, size), min((rank + 1) * step, size))


def _whole_layer(module: nn.Module, mesh: DeviceMesh) -> Fp4Linear:
    if not isinstance(module, Fp4LinearModule):
        raise TypeError(
            f"module: expected an Fp4LinearModule, got {type(module).__name__}: call quantize_model() first"
        )
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh: expected one dimension, got {mesh.ndim}: pass mesh['tp'] or the like")
    return module.layer


def _become(module: nn.Module, layer: Fp4Linear, mesh: DeviceMesh) -> None:
    """Make the module its rank's share, in place, on the mesh's kind of device."""
    if not isinstance(module, Fp4LinearModule):
        return
    device = module.device
    if device.type != mesh.device_type:
        device = (
            torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        )
    module._become(layer, device)


def _whole_shape(y: Tensor, out_features: int) -> tuple[torch.Size, tuple[int, ...]]:
    shape = torch.Size((*y.shape[:-1], out_features))
    return shape, tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _delivered(y: DTensor, layout: Placement, local: bool) -> Tensor:
    if tuple(y.placements) != (layout,):
        y = y.redistribute(placements=(layout,))
    delivered: Tensor = y.to_local() if local else y
    return delivered
