"""The parameters of a layer as a pytree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import fp4linear
from fp4linear import _core
from fp4linear.jax._decode import UNIT_K, UNIT_ROWS, products

Form = Literal["tiled", "prepacked", "canonical"]


class Canonical(NamedTuple):
    """An NVFP4 weight on the host: what `Fp4Linear(*c)` takes."""

    b: npt.NDArray[np.uint8]
    """[N, K/2], two E2M1 codes a byte, the even k in the low nibble."""
    scales: npt.NDArray[np.uint8]
    """[N, ceil(K/block_size)], E4M3 bytes."""
    scale2: npt.NDArray[np.float32]
    """[N], the global scale of each row."""
    bias: npt.NDArray[np.float32] | None
    """[N], or None."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Fp4Params:
    """The parameters of one NVFP4 linear layer, as a pytree.

    Make it with from_canonical(), from_float() or from_layer(). The arrays are leaves, the rest is static. `n` and `k`
    stay those of the whole layer where the arrays are shards of it.

    Example:
        >>> import jax, numpy as np
        >>> from fp4linear.jax import Fp4Params
        >>> params = Fp4Params.from_float(np.eye(32, 64, dtype=np.float32), np.zeros(32, np.float32), form="tiled")
        >>> params
        Fp4Params(n=32, k=64, block_size=16, form='tiled', bias=True)
        >>> jax.tree.map(lambda leaf: leaf.shape, params).weight
        (2, 1, 576)
    """

    weight: Any
    """uint8 [ceil(N/16), ceil(K/64), 576], units of 16 rows x 64 K; in the canonical form b, uint8 [N, K/2]."""
    scale2: Any
    """float32 [N], multiplies; differentiable."""
    bias: Any
    """float32 [N], or None; differentiable."""
    scales: Any
    """uint8 [N, ceil(K/block_size)] E4M3 bytes in the canonical form, else None (the units hold them)."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    block_size: int
    """Values of K that share a scale."""
    form: Form
    """'tiled' (CPU), 'prepacked' (GPU), or 'canonical' (both; slower)."""

    @classmethod
    def from_canonical(
        cls,
        b: Any,
        scales: Any,
        scale2: Any,
        bias: Any = None,
        *,
        block_size: int = 16,
        nan_scales: str = "error",
        form: Form | Literal["auto"] = "auto",
        device: jax.Device | None = None,
    ) -> Fp4Params:
        """Parameters from canonical NVFP4 arrays of any library.

        Args:
            b, scales, scale2, bias, block_size: as Fp4Linear takes them.
            nan_scales: as Fp4Linear takes it; with 'zero' the NaN bytes become zero bytes here, for good.
            form: 'auto' for what the fastest kernels of the device's platform read. A form that is named can be made on
                any machine: 'prepacked' on a host that prepares parameters for GPUs.
            device: where the arrays go, or None for JAX's default device.

        Raises:
            TypeError, ValueError: as Fp4Linear does; ValueError for a form that cannot hold the weight.
        """
        # The layer checks every argument and gives them back as plain host arrays.
        layer = fp4linear.Fp4Linear(b, scales, scale2, bias, block_size=block_size, device="cpu", nan_scales=nan_scales)
        return cls._from_host(layer, nan_scales == "zero", form, device)

    @classmethod
    def from_layer(
        cls, layer: fp4linear.Fp4Linear, *, form: Form | Literal["auto"] = "auto", device: jax.Device | None = None
    ) -> Fp4Params:
        """Parameters equal to a layer's, wherever it is; the layer's options (path, threads, ...) do not come along.

        NaN scales that the layer reads as zero are NaN here: pass such weights to from_canonical(nan_scales='zero').

        Raises:
            ValueError: a form that cannot hold the weight.
        """
        return cls._from_host(layer, False, form, device)

    @classmethod
    def from_float(
        cls,
        w: Any,
        bias: Any = None,
        *,
        method: Literal["max_abs", "four_over_six", "mse"] = "max_abs",
        scale2: float | None = None,
        form: Form | Literal["auto"] = "auto",
        device: jax.Device | None = None,
    ) -> Fp4Params:
        """Parameters of a float weight [N, K], quantised as fp4linear.quantize(w, method=, scale2=) does.

        Args:
            w, method, scale2: as fp4linear.quantize takes them.
            bias, form, device: as from_canonical() takes them.

        Raises:
            TypeError, ValueError: as fp4linear.quantize and from_canonical() do.
        """
        q = fp4linear.quantize(w, method=method, scale2=scale2)
        return cls.from_canonical(*q, bias, form=form, device=device)

    @classmethod
    def _from_host(cls, layer: fp4linear.Fp4Linear, zero_nan: bool, form: str, device: jax.Device | None) -> Fp4Params:
        b, scales, scale2 = layer.canonical()
        nan = (scales & 0x7F) == 0x7F
        if zero_nan:
            scales[nan] = 0
            nan[:] = False
        n, k, block_size = layer.out_features, layer.in_features, layer.block_size
        chosen: Any = form  # 'auto' no more after this
        if form == "auto":
            chosen = _core.weight_form(_platform(device), k, block_size, bool(nan.any()))
        if chosen not in ("tiled", "prepacked", "canonical"):
            raise ValueError(f"form: expected 'auto', 'tiled', 'prepacked' or 'canonical', got {form!r}")
        if chosen == "prepacked" and nan.any():
            raise ValueError(f"form: the prepacked form can hold no NaN scale, and there are {int(nan.sum())}")
        canonical = chosen == "canonical"
        units = b if canonical else _core.pack_weight(b, scales, n, k, block_size, chosen)
        arrays = {
            "weight": units,
            "scale2": np.broadcast_to(scale2, (n,)),
            "bias": layer.bias,
            "scales": scales if canonical else None,
        }
        return cls(
            **jax.device_put(arrays, device),
            n=n,
            k=k,
            block_size=block_size,
            form=chosen,
        )

    def __repr__(self) -> str:
        bias = self.bias is not None
        return f"Fp4Params(n={self.n}, k={self.k}, block_size={self.block_size}, form={self.form!r}, bias={bias})"

    @property
    def out_features(self) -> int:
        """N."""
        return self.n

    @property
    def in_features(self) -> int:
        """K."""
        return self.k

    def canonical(self) -> Canonical:
        """The weight as canonical host arrays, bit for bit. The arrays must be concrete, and the whole layer's."""
        weight = np.asarray(self.weight)
        if self.form == "canonical":
            b, scales = weight, np.asarray(self.scales)
        else:
            b, scales = _core.unpack_weight(weight, self.n, self.k, self.block_size, self.form)
        bias = None if self.bias is None else np.asarray(self.bias)
        return Canonical(b, scales, np.asarray(self.scale2), bias)

    def layer(self, **options: Any) -> fp4linear.Fp4Linear:
        """An Fp4Linear with these parameters. options: its keyword arguments (device, path, ...)."""
        options.setdefault("nan_scales", "propagate")
        return fp4linear.Fp4Linear(*self.canonical(), block_size=self.block_size, **options)

    def to(self, form: Form | Literal["auto"] = "auto", device: jax.Device | None = None) -> Fp4Params:
        """The same parameters in another form, on another device."""
        c = self.canonical()
        return Fp4Params.from_canonical(
            *c, block_size=self.block_size, nan_scales="propagate", form=form, device=device
        )

    def dequantize(self, dtype: Any = jnp.float32) -> jax.Array:
        """The weight [N, K], e2m1 * e4m3 * scale2, in plain JAX: it can be traced, sharded and differentiated.

        Rounded once to float32, and then to dtype. Of a shard of the parameters it gives the shard of the weight.
        """
        rank = 2 if self.form == "canonical" else 3
        if self.weight.ndim != rank:
            raise ValueError(
                f"params: expected a weight of {rank} axes, got {self.weight.shape}; use jax.vmap for stacks"
            )
        unscaled = products(
            self.weight,
            self.scales,
            n=self.scale2.shape[0],
            k=self.k,
            block_size=self.block_size,
            form=self.form,
            dtype=jnp.float32,
        )
        weight: jax.Array = (unscaled * self.scale2[:, None]).astype(dtype)
        return weight

    def partition_specs(self, out_axis: Any = None, in_axis: Any = None) -> Fp4Params:
        """The PartitionSpec of every array, as a pytree for shard_map's in_specs or NamedSharding.

        Args:
            out_axis: mesh axis that splits N (a column-parallel layer), or None. Its size must divide N / 16.
            in_axis: mesh axis that splits K (a row-parallel layer: see linear(reduce_over=)), or None. Its size must
                divide K / 64, or in the canonical form K / block_size.
        """
        spec: Any = jax.sharding.PartitionSpec
        units = (None,) if self.form != "canonical" else ()
        return dataclasses.replace(
            self,
            weight=spec(out_axis, in_axis, *units),
            scale2=spec(out_axis),
            bias=None if self.bias is None else spec(out_axis),
            scales=None if self.scales is None else spec(out_axis, in_axis),
        )

    def shard(self, mesh: jax.sharding.Mesh, out_axis: Any = None, in_axis: Any = None) -> Fp4Params:
        """The parameters spread over a mesh as partition_specs() says.

        Raises:
            ValueError: the shards would not be whole units.
        """
        for name, axis, size, unit in (
            ("N", out_axis, self.n, 1 if self.form == "canonical" else UNIT_ROWS),
            ("K", in_axis, self.k, math.lcm(self.block_size, 2) if self.form == "canonical" else UNIT_K),
        ):
            names = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
            parts = math.prod(mesh.shape[each] for each in names)
            if parts > 1 and size % (parts * unit):
                raise ValueError(
                    f"{name} = {size} does not split into {parts} shards of whole units of {unit} "
                    f"(form {self.form!r}, mesh axis {axis!r})"
                )
        specs = self.partition_specs(out_axis, in_axis)
        shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
        placed: Fp4Params = jax.device_put(self, shardings)
        return placed


def _is_spec(x: Any) -> bool:
    return isinstance(x, jax.sharding.PartitionSpec)


def _platform(device: jax.Device | None) -> str:
    """'cpu' or 'gpu': where arrays for the device go."""
    (there,) = jax.device_put(np.zeros(0, np.uint8), device).devices()
    if there.platform not in ("cpu", "gpu"):
        raise ValueError(f"device: the kernels run on CPUs and NVIDIA GPUs, got {there} ({there.platform})")
    return str(there.platform)


jax.tree_util.register_dataclass(
    Fp4Params,
    data_fields=["weight", "scale2", "bias", "scales"],
    meta_fields=["n", "k", "block_size", "form"],
)
