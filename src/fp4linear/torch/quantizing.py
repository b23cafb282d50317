"""quantize_model: every nn.Linear of a model to NVFP4, in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fp4linear._quantize import Method

from ._progress import each
from .module import Fp4LinearModule

Rule = str | re.Pattern[str] | Callable[[str, nn.Module], bool]
DEFAULT_EXCLUDE = ("lm_head",)


@dataclass(frozen=True)
class QuantizedLinear:
    """A layer that was swapped; bytes of weight and bias before, and of the whole layer after."""

    name: str
    in_features: int
    out_features: int
    bytes_before: int
    bytes_after: int


@dataclass
class QuantizeReport:
    """What quantize_model did."""

    layers: list[QuantizedLinear] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Name of an nn.Linear that was left alone -> why."""
    unmatched: list[str] = field(default_factory=list)
    """Globs and regular expressions of `exclude` that matched no nn.Linear: misspelt, perhaps."""

    @property
    def bytes_before(self) -> int:
        """Bytes of the float weights and biases that were replaced."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the layers that took their place."""
        return sum(layer.bytes_after for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers to NVFP4: {_size(self.bytes_before)} -> {_size(self.bytes_after)}"]
        lines += [f"{name}: left as it is, {reason}" for name, reason in self.skipped.items()]
        lines += [f"exclude: {rule} matched nothing" for rule in self.unmatched]
        return "\n".join(lines)


def quantize_model(
    model: nn.Module,
    exclude: Rule | Iterable[Rule] = DEFAULT_EXCLUDE,
    *,
    method: Method = "max_abs",
    progress: bool = True,
    **options: Any,
) -> QuantizeReport:
    """Swap every nn.Linear of a model for an Fp4LinearModule with its quantised weight, in place, one at a time.

    A layer whose weight another module uses too (a head tied to the embedding) is left alone, because the other one
    would keep the float weight and the tie be gone; two nn.Linear without bias that share a weight share the quantised
    layer as well. Left alone are also: subclasses of nn.Linear, which other code treats specially, the parts of
    nn.TransformerEncoderLayer, which reads their weights, layers with hooks, odd in_features, and weights that are
    not finite.

    Args:
        model: any module but an nn.Linear itself.
        exclude: which layers to leave alone. A string is a glob on the layer's name, on its last part, or on the
            name of a module that it lies in ("lm_head", "model.layers.0", "*.mlp.*"); a compiled regular expression
            is searched in the name; a callable gets name and module.
        method: as for `fp4linear.quantize`.
        progress: show a bar on stderr.
        options: as for `fp4linear.Fp4Linear`; device= by default where each weight is.

    Returns:
        QuantizeReport: the layers with their bytes before and after, the others with the reason.

    Raises:
        TypeError: model is an nn.Linear, which can't be swapped in place.

    Example:
        >>> import torch
        >>> from fp4linear.torch import quantize_model
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 63))
        >>> report = quantize_model(model, exclude="2", progress=False)
        >>> [(layer.name, layer.bytes_before, layer.bytes_after) for layer in report.layers], report.skipped
        ([('0', 66560, 10244)], {'2': 'excluded'})
    """
    if isinstance(model, nn.Linear):
        raise TypeError("model: an nn.Linear can't be swapped in place: use Fp4LinearModule.from_linear(model)")
    rules: list[Rule] = [exclude] if isinstance(exclude, (str, re.Pattern)) or callable(exclude) else list(exclude)
    used: set[int] = set()
    report = QuantizeReport()
    users = _users_of_parameters(model)
    made_of: dict[int, Fp4LinearModule] = {}  # by the weight, for weights that several nn.Linear share
    todo = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    parts_of_encoders = {
        id(part): "torch's nn.TransformerEncoderLayer reads its weight"
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        for part in (module.linear1, module.linear2)
    }
    for name, module in each(todo, "Quantising", progress):
        excluding = [i for i, rule in enumerate(rules) if _matches(rule, name, module)]
        used.update(excluding)
        reason = "excluded" if excluding else parts_of_encoders.get(id(module)) or _why_not(module, users)
        if reason:
            report.skipped[name] = reason
            continue
        before = module.weight.nbytes + (0 if module.bias is None else module.bias.nbytes)
        shared = made_of.get(id(module.weight))
        try:
            if shared is not None and shared.bias is None and module.bias is None:
                made = Fp4LinearModule.from_layer(shared.layer)
                made.train(module.training)
            else:
                made = Fp4LinearModule.from_linear(module, method=method, **options)
        except ValueError as error:
            report.skipped[name] = str(error)
            continue
        made_of.setdefault(id(module.weight), made)
        replace_module(model, module, made)
        report.layers.append(QuantizedLinear(name, made.in_features, made.out_features, before, made.layer.nbytes))
    report.unmatched = [
        rule if isinstance(rule, str) else rule.pattern
        for i, rule in enumerate(rules)
        if i not in used and exclude is not DEFAULT_EXCLUDE and isinstance(rule, (str, re.Pattern))
    ]
    return report


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place, or the places, of another."""
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[child_name] = new


def _matches(rule: Rule, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        parts = name.split(".")
        inside = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return fnmatchcase(parts[-1], rule) or any(fnmatchcase(path, rule) for path in inside)
    if isinstance(rule, re.Pattern):
        return rule.search(name) is not None
    return bool(rule(name, module))


def _users_of_parameters(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Which modules hold a parameter, by its identity."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((name, module))
    return users


def _why_not(module: nn.Linear, users: dict[int, list[tuple[str, nn.Module]]]) -> str | None:
    """Why a layer is left alone, or None."""
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, which other code may treat specially"
    others = [name for name, user in users.get(id(module.weight), []) if type(user) is not nn.Linear]
    if others:
        return f"its weight is tied to {', '.join(others)}"
    if module.weight.is_meta:
        return "its weight is on the meta device"
    if module.in_features % 2:
        return f"in_features is {module.in_features}: two codes share a byte, so it must be even"
    if module.weight.numel() == 0:
        return "it has no weights"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind) for kind in hooks):
        return "it has hooks, which a new module would lose"
    return None


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.2f} GiB"
