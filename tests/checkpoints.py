"""Checkpoint files for tests, written byte by byte so that they can also be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Tensor = tuple[str, list[int], bytes]  # dtype, shape, data


def header_of(tensors: dict[str, Tensor]) -> dict[str, Any]:
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    return header


def file_bytes(header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def write_file(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    header = header_of(tensors)
    if metadata:
        header["__metadata__"] = metadata
    path.write_bytes(file_bytes(header, b"".join(data for _, _, data in tensors.values())))
    return path


def weight_bytes(n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """b and scales of cases.md: random codes, scale bytes 0x20..0x58."""
    random = np.random.default_rng(seed)
    b = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
    return b, random.integers(0x20, 0x59, (n, -(-k // 16)), dtype=np.uint8)


def x_of(m: int, k: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((m, k)).astype(np.float16)


def f32(value: float) -> Tensor:
    return "F32", [], np.float32(value).tobytes()


def modelopt(name: str, n: int, k: int, seed: int, scale2: float) -> dict[str, Tensor]:
    b, scales = weight_bytes(n, k, seed)
    return {
        f"{name}.weight": ("U8", [n, k // 2], b.tobytes()),
        f"{name}.weight_scale": ("F8_E4M3", [n, -(-k // 16)], scales.tobytes()),
        f"{name}.weight_scale_2": f32(scale2),
    }


def compressed(name: str, n: int, k: int, seed: int, divisor: float) -> dict[str, Tensor]:
    b, scales = weight_bytes(n, k, seed)
    return {
        f"{name}.weight_packed": ("U8", [n, k // 2], b.tobytes()),
        f"{name}.weight_scale": ("F8_E4M3", [n, -(-k // 16)], scales.tobytes()),
        f"{name}.weight_global_scale": ("F32", [1], np.float32(divisor).tobytes()),
    }


def write_shards(directory: Path, shards: dict[str, dict[str, Tensor]]) -> Path:
    """Several files and their index."""
    for file, tensors in shards.items():
        write_file(directory / file, tensors)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index
