"""Which device a benchmark runs on, and why."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Choice:
    """index: of the GPU, None for the CPU. why: a sentence for the user."""

    index: int | None
    why: str

    @property
    def name(self) -> str:
        return "cpu" if self.index is None else f"cuda:{self.index}"


def import_torch() -> Any:
    """torch, where it can use a GPU. ValueError, with what to install, otherwise."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        what = "is not installed" if isinstance(error, ModuleNotFoundError) else f"can't be imported ({error})"
        raise ValueError(f"a benchmark on a GPU needs torch, which {what}: pip install 'fp4linear[torch]'") from None
    if not torch.cuda.is_available():
        raise ValueError(
            f"a benchmark on a GPU needs torch with CUDA: this torch {torch.__version__} sees no GPU; "
            "install a CUDA build of it"
        )
    return torch


def choose_device(wanted: str | None, *, cpu_option: str | None = None) -> Choice:
    """The device for `--device wanted`; None is the first GPU where it can be used, else the CPU.

    cpu_option: an option in use that only the CPU has, such as "--threads". ValueError where what was asked for can't
    be had.
    """
    from fp4linear import _core

    if wanted == "cpu":
        return Choice(None, "--device cpu")
    info = _core.cuda_info()
    if wanted is None:
        if cpu_option is not None:
            return Choice(None, f"{cpu_option} is an option of the CPU")
        if not info["devices"]:
            return Choice(None, f"no GPU: {info['reason']}")
        first = info["devices"][0]
        try:
            import_torch()
        except ValueError as error:
            return Choice(None, f"{first['name']} is there, but {error}")
        return Choice(first["index"], f"{first['name']} and torch with CUDA are there")
    index = parse_index(wanted)
    if cpu_option is not None:
        raise ValueError(f"device: got {wanted!r} with {cpu_option}, which is an option of the CPU")
    if index not in [device["index"] for device in info["devices"]]:
        reason = info["reason"] or f"GPUs here: {', '.join(str(device['index']) for device in info['devices'])}"
        raise ValueError(f"device: got {wanted!r}, which this build can't use: {reason}")
    import_torch()
    return Choice(index, f"--device {wanted}")


def parse_index(text: str) -> int:
    """N of "cuda:N", 0 of "cuda"."""
    name, colon, number = text.partition(":")
    if name != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f"device: got {text!r}, expected cpu, cuda or cuda:N")
    return int(number or 0)
