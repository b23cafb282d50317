"""What may come out of a loader: a layer that is what the file says, or an error that says what is wrong with it."""

from __future__ import annotations

import os
import re
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

import fp4linear
from fp4linear.files import FormatError, convert_file, inspect, layers, load_awq, open_tensors, read_layer
from fp4linear.files.formats.base import Parts
from fp4linear.files.formats.registry import SUPPORTED
from fp4linear.files.writers import WRITERS
from tests.fuzz.choices import Choices

MEMORY = 1 << 30  # bytes above what the process holds: inputs are a few KiB, so that nothing comes near it
SECONDS = 30  # for one input, on a machine that does other things too; they take milliseconds
PLACE = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
# A ValueError that is no FormatError names the argument that its value came in by.
ARGUMENTS = re.compile(
    r"(b|scales|scale2(\[\d+\])?|bias|block_size|name|names|format|swizzled|nibbles|layer|layers|model|activations|"
    r"pre_quant_scale|arrays|input_scale|to|w)\b"
)


@contextmanager
def refusals(source: str) -> Iterator[None]:
    """Lets the documented errors pass and everything else through: what numpy says of a shape helps nobody.

    source: what the messages call the file.
    """
    try:
        yield
    except FormatError:
        pass
    except ValueError as error:
        text = str(error)
        named = text.startswith((source, str(PLACE))) or ARGUMENTS.match(text)
        if type(error) is not ValueError or not named:
            raise AssertionError(f"not a documented error: {type(error).__name__}: {text[:300]}") from error


@contextmanager
def bounds() -> Iterator[None]:
    """Memory and time end as MemoryError and TimeoutError, which no harness lets pass."""

    def late(*_: object) -> None:
        raise TimeoutError(f"one input took more than {SECONDS} s")

    before, limit = signal.signal(signal.SIGALRM, late), resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        held = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, limit[1]))
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limit)


@contextmanager
def file_of(data: bytes, suffix: str) -> Iterator[Path]:
    """The bytes as a file, alone in a directory."""
    directory = PLACE / f"fp4linear-fuzz-{os.getpid()}"
    directory.mkdir(exist_ok=True)
    path = directory / f"input{suffix}"
    path.write_bytes(data)
    try:
        yield path
    finally:
        for left in directory.iterdir():
            left.unlink()
        with suppress(OSError):
            directory.rmdir()


def options_of(choices: Choices) -> dict[str, Any]:
    """What a caller may say; mostly nothing."""
    options: dict[str, Any] = {}
    if choices.one_in(3):
        options["format"] = choices.pick(tuple(SUPPORTED))
    if choices.one_in(3):
        options["swizzled"] = choices.pick((True, False))
    if choices.one_in(3):
        options["nibbles"] = choices.pick(("low", "high"))
    return options


def exercise(source: Any, choices: Choices, *, writes: bool = True) -> None:
    """Everything that a caller does with a checkpoint."""
    shown = "the mapping" if isinstance(source, dict) else str(source)
    with refusals(shown):
        tensors = open_tensors(source)
        for name in tensors:
            with refusals(shown):
                info, raw = tensors.info(name), tensors.array(name)
                assert raw.nbytes == info.nbytes == len(raw.tobytes()), name
    options, names = options_of(choices), ["p"]
    with refusals(shown):
        report = inspect(source, **options)
        names += [layer.name for layer in report.layers]
        assert repr(report.as_dict())
    with refusals(shown):
        assert [layer.name for layer in layers(source)] == names[1:]
    for name in names[:12]:
        said = options if choices.one_in(2) else {}
        parts = None
        with refusals(shown):
            parts = read_layer(open_tensors(source), name, **said)
            check_parts(parts)
        with refusals(shown):
            layer = fp4linear.load(source, name, nan_scales=choices.pick(("error", "zero", "propagate")), **said)
            assert parts is not None, f"{name}: load gives what read_layer refuses"
            check_layer(layer, parts)
        with refusals(shown):
            load_awq(source, name)(np.ones((2, 64), np.float16))
    if len(names) > 2:
        with refusals(shown):
            fp4linear.load(source, names[1:][:3], nan_scales="propagate")
    if writes:
        check_conversion(source, choices, options, shown)


def check_parts(parts: Parts) -> None:
    """The canonical form, whatever it was made of."""
    n, half = parts.b.shape
    assert parts.b.dtype == parts.scales.dtype == np.uint8
    assert parts.scales.shape == (n, -(-2 * half // 16))
    assert parts.scale2.dtype == np.float32 and parts.scale2.shape in ((), (n,))
    assert np.isfinite(parts.scale2).all()
    assert parts.bias is None or (parts.bias.dtype == np.float32 and parts.bias.shape == (n,))
    assert parts.pre_quant_scale is None or parts.pre_quant_scale.shape == (2 * half,)


def check_layer(layer: Any, parts: Parts) -> None:
    """The layer holds the parts bit for bit, and computes."""
    b, scales, _ = layer.canonical()
    assert np.array_equal(b, parts.b) and np.array_equal(scales, parts.scales)
    n, k = layer.out_features, layer.in_features
    if n * k <= 1 << 20:
        x = np.ones((2, k), np.float16)
        y = layer.forward(x)
        assert y.shape == (2, n) and y.tobytes() == layer.forward(x).tobytes()


def check_conversion(source: Any, choices: Choices, options: dict[str, Any], shown: str) -> None:
    """What a writer accepts is read back as it was; what it refuses leaves no file behind."""
    target = choices.pick(tuple(WRITERS))
    out = PLACE / f"fp4linear-fuzz-{os.getpid()}.safetensors"
    written = []
    try:
        with refusals(shown):
            written = convert_file(source, out, target, rounding=choices.one_in(2), force=True, **options)
        left = sorted(path.name for path in PLACE.glob(f"{out.name}*"))
        assert left == ([out.name] if written else []), left
        for layer in written:
            said = {"format": target} if target in ("comfyui", "modelopt") else {}
            wide = min(layer.in_features, layer.out_features) > 0
            after = read_layer(open_tensors(out), layer.name, awq=True, **said)
            before = read_layer(open_tensors(source), layer.source, awq=True, **relevant(layer.source_format, options))
            assert np.array_equal(after.b, before.b) or not wide
            assert np.array_equal(after.scales, before.scales) or not wide
            factors = np.broadcast_to(after.scale2, ()), np.broadcast_to(before.scale2.reshape(-1)[:1].reshape(()), ())
            assert layer.rounded or factors[0] == factors[1], factors
    finally:
        out.unlink(missing_ok=True)


def relevant(found: str, options: dict[str, Any]) -> dict[str, Any]:
    """The part of what a caller said that concerns a format, as the converter picks it."""
    kept = {key: value for key, value in options.items() if key in SUPPORTED[found].options}
    return kept | ({"format": found} if options.get("format") == found else {})


def guarded(target: Callable[[Choices], None]) -> Callable[[bytes], None]:
    """A target as the fuzzers call it."""

    def call(data: bytes) -> None:
        with bounds():
            target(Choices(data))

    return call
