"""The checks of `fp4linear selftest --native`: what has to be seen on a GPU that nobody of this project has.

Every check forces the path and compares with reference_native(), float64 with the quantised x in the place of x. x and
weights of some are chosen so that every sum is exact in fp32, whatever its order: then the bits are decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

import fp4linear
from fp4linear import _core

SUM_ERROR = 2.0**-15  # of the sum of |x w|: docs/numerics.md
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
LEAST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}
REPEATS = 20
# M, N, K: around the tiles of a family's kernels (128 and 256 rows, 128 columns), tails of M, less than a stage of K.
SHAPES = (
    (9, 32, 32), (16, 128, 64), (127, 160, 96), (128, 128, 256), (129, 256, 512), (255, 96, 1056), (257, 512, 1024),
    (300, 1056, 2048), (1024, 1024, 4096),
)  # fmt: skip


@dataclass
class Check:
    """One line of the report."""

    name: str
    passed: bool
    detail: str


class Backend:
    """Arrays to a device and back, through the framework that is installed there."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device == "cpu":
            self.framework = "numpy"
            return
        for self.framework in ("torch", "cupy"):
            try:
                self.module: Any = __import__(self.framework)
            except ImportError:
                continue
            break
        else:
            raise RuntimeError("arrays on a GPU need torch or CuPy, and neither is installed")

    def to(self, values: npt.NDArray[np.float32], dtype: str) -> Any:
        """The values rounded to a 16-bit type, on the device. bf16 on the CPU is ml_dtypes', on a GPU torch's."""
        if self.framework == "torch":
            return self.module.from_numpy(values).to(self.device, getattr(self.module, dtype))
        if dtype == "bfloat16":
            import ml_dtypes

            rounded: Any = values.astype(ml_dtypes.bfloat16)
            if self.framework == "numpy":
                return rounded
            raise RuntimeError("bfloat16 on a GPU needs torch here")
        half = values.astype(np.float16)
        return half if self.framework == "numpy" else self.module.asarray(half)

    def back(self, array: Any) -> npt.NDArray[np.float32]:
        if self.framework == "torch":
            result: npt.NDArray[np.float32] = array.float().cpu().numpy()
            return result
        return np.asarray(array.get() if self.framework == "cupy" else array).astype(np.float32)

    def wait(self) -> None:
        if self.framework == "torch":
            self.module.cuda.synchronize()
        elif self.framework == "cupy":
            self.module.cuda.Device().synchronize()

    def dtypes(self) -> tuple[str, ...]:
        if self.framework == "torch":
            return ("bfloat16", "float16")
        return ("bfloat16", "float16") if self.framework == "numpy" and _has_ml_dtypes() else ("float16",)


def _has_ml_dtypes() -> bool:
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        return False
    return True


def unavailable(device: str, path: str) -> str | None:
    """Why the path can't run on a device, or None."""
    if device != "cpu" and not _core.cuda_info()["devices"]:
        return str(_core.cuda_info()["reason"])
    b, scales = np.zeros((32, 16), np.uint8), np.zeros((32, 2), np.uint8)
    try:
        plan = fp4linear.Fp4Linear(b, scales, 1.0, device=device, path=path).plan(16)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None if plan.path == path else str(plan.reasons.get(path, plan))


def checks(device: str, path: str) -> Iterator[Check]:
    """All checks, as they finish."""
    backend = Backend(device)
    makers: list[tuple[str, Callable[[], str]]] = []
    for dtype in backend.dtypes():
        for m, n, k in SHAPES:
            makers.append((f"{dtype} M={m} N={n} K={k}", partial(_random, backend, path, m, n, k, dtype)))
        makers += [
            (f"{dtype} every position of x and of the weight", partial(_positions, backend, path, dtype)),
            (f"{dtype} every scale byte of the weight", partial(_weight_scales, backend, path, dtype)),
            (f"{dtype} scales of x", partial(_x_scales, backend, path, dtype)),
            (f"{dtype} bias and a factor a row", partial(_epilogue, backend, path, dtype)),
            (f"{dtype} dynamic global scale", partial(_global_scale, backend, path, dtype, "dynamic")),
            (f"{dtype} given global scale", partial(_global_scale, backend, path, dtype, 37.5)),
            (f"{dtype} infinity and NaN stay in their rows", partial(_bad_rows, backend, path, dtype)),
            (f"{dtype} out= that begins at any element", partial(_unaligned_out, backend, path, dtype)),
            (f"{dtype} {REPEATS} calls give the same bits", partial(_repeats, backend, path, dtype)),
        ]
    makers.append(("native_emulated on the same device", partial(_against_emulated, backend, path)))
    for name, make in makers:
        try:
            yield Check(name, True, make())
        except (AssertionError, RuntimeError, ValueError) as error:
            yield Check(name, False, f"{type(error).__name__}: {error}")


def timings(
    device: str, path: str, *, paths: tuple[str, ...] = ("native_emulated", "dequant_cublas")
) -> dict[str, float]:
    """Median milliseconds of a call, for orientation: one layer, its weight warm in the cache."""
    backend = Backend(device)
    found: dict[str, float] = {}
    n, k = (4096, 4096) if device != "cpu" else (256, 256)
    b, scales = _weight(n, k, 1)
    for name in dict.fromkeys((path, *paths)):
        if name == path or unavailable(device, name) is None:
            layer = fp4linear.Fp4Linear(b, scales, 2.0**-8, device=device, path=name)
            for m in (16, 128, 1024) if device != "cpu" else (16,):
                x = backend.to(_normal(m, k, 2), backend.dtypes()[-1])
                samples = []
                for repeat in range(REPEATS + 3):
                    backend.wait()
                    start = time.perf_counter()
                    layer.forward(x)
                    backend.wait()
                    if repeat >= 3:
                        samples.append(time.perf_counter() - start)
                found[f"{name} M={m} N={n} K={k}"] = 1e3 * float(np.median(samples))
    return found


def report(device: str, path: str, results: list[Check], times: dict[str, float]) -> dict[str, Any]:
    """What to send back."""
    import platform

    info = _core.cuda_info()
    return {
        "fp4linear": fp4linear.__version__,
        "build": info["build_info"],
        "devices": [dict(entry) for entry in info["devices"]],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "device": device,
        "path": path,
        "checks": [asdict(result) for result in results],
        "milliseconds": times,
    }


def _weight(n: int, k: int, seed: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    random = np.random.default_rng(seed)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return b, random.integers(0x28, 0x50, (n, k // 16), dtype=np.uint8)


def _normal(m: int, k: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32)


def _forward(backend: Backend, path: str, layer: Any, x: Any) -> npt.NDArray[np.float32]:
    y = layer.forward(x)
    assert layer.last_path == path, f"{layer.last_path} ran"
    return backend.back(y)


def _compare(
    backend: Backend, path: str, dtype: str, values: npt.NDArray[np.float32], b: Any, scales: Any, scale2: Any,
    bias: Any = None, *, exact: bool = False, **scale: Any,
) -> str:  # fmt: skip
    x = backend.to(values, dtype)
    held = backend.back(x)
    layer = fp4linear.Fp4Linear(b, scales, scale2, bias, device=backend.device, path=path, **scale)
    y = _forward(backend, path, layer, x).astype(np.float64)
    want = fp4linear.reference_native(held, b, scales, scale2, bias, **scale)
    assert y.shape == want.shape, f"shape {y.shape}"
    spread = np.abs(fp4linear.reference_native(np.abs(held), b & 0x77, scales & 0x7F, np.abs(scale2), **scale))
    if bias is not None:
        spread = spread + np.abs(np.asarray(bias, np.float64))
    bound = UNIT_ROUNDOFF[dtype] * np.abs(want) + np.where(np.abs(want) < LEAST_NORMAL[dtype], 2.0**-25, 0.0)
    bound = bound if exact else bound + SUM_ERROR * spread
    error = np.abs(y - want)
    wrong = ~(error <= bound)  # NaN is wrong
    worst = np.unravel_index(np.argmax(np.where(np.isnan(error), np.inf, error - bound)), error.shape)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} outside the bound; at {[int(i) for i in worst]} {y[worst]!r}, "
        f"expected {want[worst]!r} within {bound[worst]:.3g}"
    )
    share = error / np.where(bound > 0, bound, 1.0)
    return f"worst error {share.max(initial=0.0):.2f} of the bound"


def _random(backend: Backend, path: str, m: int, n: int, k: int, dtype: str) -> str:
    return _compare(backend, path, dtype, _normal(m, k, m), *_weight(n, k, n + k), 2.0**-6)


def _positions(backend: Backend, path: str, dtype: str) -> str:
    """Rows of 6 I pick columns of the weight: each y is one product, whose place tells every index of both operands."""
    n, k = 288, 160
    random = np.random.default_rng(3)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scales = random.choice(np.array([0x30, 0x38, 0x40, 0x48], np.uint8), (n, k // 16))
    return _compare(backend, path, dtype, 6 * np.eye(k, dtype=np.float32), b, scales, 0.5, exact=True)


def _weight_scales(backend: Backend, path: str, dtype: str) -> str:
    """Every finite E4M3 byte, signs too, each in a block of its own."""
    finite = np.array([byte for byte in range(256) if byte & 0x7F != 0x7F], np.uint8)
    n, k = 256, 64
    scales = np.resize(finite, (n, k // 16))
    b = np.full((n, k // 2), 0x22, np.uint8)
    x = np.zeros((16, k), np.float32)
    x[np.arange(16), np.arange(16) * 4] = 6.0
    return _compare(backend, path, dtype, x, b, scales, 2.0**-6, exact=True)


def _x_scales(backend: Backend, path: str, dtype: str) -> str:
    """Another power of two in every block of x, so that a scale read from a wrong place shows."""
    m, k = 144, 128
    block = np.arange(m)[:, None] * 7 + np.arange(k // 16) * 3
    x = np.zeros((m, k), np.float32)
    x[:, ::16] = 6 * 2.0 ** (block % 11 - 5)
    b = np.full((64, k // 2), 0x22, np.uint8)
    scales = np.zeros((64, k // 16), np.uint8)
    scales[np.arange(64), np.arange(64) % (k // 16)] = 0x38  # a row of the weight sees one block
    return _compare(backend, path, dtype, x, b, scales, 1.0, exact=True)


def _epilogue(backend: Backend, path: str, dtype: str) -> str:
    n, k = 224, 256
    factors = np.linspace(-0.25, 0.5, n).astype(np.float32)
    bias = np.linspace(-3, 3, n).astype(np.float32)
    return _compare(backend, path, dtype, _normal(40, k, 5), *_weight(n, k, 6), factors, bias)


def _global_scale(backend: Backend, path: str, dtype: str, scale: Any) -> str:
    values = _normal(70, 512, 7) * np.float32(0.01)
    return _compare(backend, path, dtype, values, *_weight(96, 512, 8), 2.0**-4, input_global_scale=scale)


def _bad_rows(backend: Backend, path: str, dtype: str) -> str:
    values = _normal(20, 96, 9)
    values[3, 5], values[11, 90] = np.inf, np.nan
    b, scales = _weight(64, 96, 10)
    layer = fp4linear.Fp4Linear(b, scales, 0.5, device=backend.device, path=path)
    y = _forward(backend, path, layer, backend.to(values, dtype))
    bad = np.zeros(20, bool)
    bad[[3, 11]] = True
    assert np.isnan(y[bad]).all(), "a row with an infinity or a NaN has an output that is none"
    assert np.isfinite(y[~bad]).all(), "a good row has an output that is not finite"
    return "2 of 20 rows"


def _unaligned_out(backend: Backend, path: str, dtype: str) -> str:
    m, n, k = 33, 96, 64
    layer = fp4linear.Fp4Linear(*_weight(n, k, 15), 0.5, device=backend.device, path=path)
    x = backend.to(_normal(m, k, 16), dtype)
    longer = backend.to(np.full(m * n + 2, np.nan, np.float32), dtype)
    layer.forward(x, out=longer[1:-1].reshape(m, n))
    assert layer.last_path == path, f"{layer.last_path} ran"
    held = backend.back(longer)
    assert np.isnan(held[[0, -1]]).all(), "something was written beside out"
    assert np.array_equal(held[1:-1].reshape(m, n), _forward(backend, path, layer, x)), "not the bits of a fresh y"
    return f"{m * n} outputs"


def _repeats(backend: Backend, path: str, dtype: str) -> str:
    b, scales = _weight(512, 2048, 11)
    layer = fp4linear.Fp4Linear(b, scales, 2.0**-6, device=backend.device, path=path)
    x = backend.to(_normal(200, 2048, 12), dtype)
    first = _forward(backend, path, layer, x)
    for _ in range(REPEATS - 1):
        assert np.array_equal(first, _forward(backend, path, layer, x), equal_nan=True), "two equal calls differ"
    return f"{first.size} outputs"


def _against_emulated(backend: Backend, path: str) -> str:
    """How often the tensor cores' sums round as the ascending order of blocks does. Only a large part is required."""
    if unavailable(backend.device, "native_emulated") is not None:
        return "it is not there"
    b, scales = _weight(256, 1024, 13)
    x = backend.to(_normal(100, 1024, 14), backend.dtypes()[-1])
    results = [
        _forward(backend, name, fp4linear.Fp4Linear(b, scales, 2.0**-6, device=backend.device, path=name), x)
        for name in (path, "native_emulated")
    ]
    equal = float((results[0] == results[1]).mean())
    assert equal > 0.9, f"only {equal:.1%} of the outputs are equal"
    return f"{equal:.2%} of the outputs equal"
