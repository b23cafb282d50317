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


def pack_high(b: np.ndarray) -> np.ndarray:
    """The other order of nibbles."""
    return (b >> 4) | (b << 4)


def swizzle(scales: np.ndarray) -> np.ndarray:
    """The 128x4 layout [roundup(N, 128), roundup(C, 4)], by the published formula."""
    rows, blocks = scales.shape
    atoms = -(-blocks // 4)
    out = np.zeros((-(-rows // 128) * 128, atoms * 4), np.uint8)
    flat = out.reshape(-1)
    for r in range(rows):
        for c in range(blocks):
            flat[((r // 128) * atoms + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scales[r, c]
    return out


def padded(a: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Zeros after the last row and column, up to multiples."""
    n, k = a.shape
    return np.pad(a, ((0, -n % rows), (0, -k % columns)))


def u8(a: np.ndarray) -> Tensor:
    return "U8", list(a.shape), np.ascontiguousarray(a).tobytes()


def f8(a: np.ndarray) -> Tensor:
    return "F8_E4M3", list(a.shape), np.ascontiguousarray(a).tobytes()


def torchao(name: str, n: int, k: int, seed: int, scale2: float | None, *, swizzled: bool) -> dict[str, Tensor]:
    b, scales = weight_bytes(n, k, seed)
    held = swizzle(scales).reshape(-(-n // 128) * 32, -(-k // 64) * 16) if swizzled else scales
    tensors = {f"{name}._weight_qdata": u8(b), f"{name}._weight_scale": f8(held)}
    return tensors if scale2 is None else tensors | {f"{name}._weight_per_tensor_scale": f32(scale2)}


def torchao_header(name: str, *, swizzled: bool, kind: str = "NVFP4Tensor") -> dict[str, str]:
    data = {
        "is_swizzled_scales": swizzled,
        "block_size": 16,
        "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
    }
    entry = {"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale", "per_tensor_scale"]}
    return {f"{name}.weight": json.dumps(entry), "tensor_names": json.dumps([f"{name}.weight"])}


def single_file(
    name: str, n: int, k: int, seed: int, scale2: float, *, high: bool = True, mark: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """ComfyUI's layout: rows and columns padded to 16, scales swizzled; the mark becomes X.comfy_quant."""
    b, scales = weight_bytes(n, k, seed)
    codes = padded(pack_high(b) if high else b, 16, 8)
    held = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint8)
    held[:n, : scales.shape[1]] = scales
    tensors = {
        f"{name}.weight": u8(codes),
        f"{name}.weight_scale": f8(swizzle(held)),
        f"{name}.weight_scale_2": f32(scale2),
    }
    if mark is not None:
        text = json.dumps(mark).encode()
        tensors[f"{name}.comfy_quant"] = ("U8", [len(text)], text)
    return tensors


def transformer_engine(
    name: str, n: int, k: int, seed: int, amax: float, *, swizzled: bool = False
) -> dict[str, Tensor]:
    b, scales = weight_bytes(n, k, seed)
    held = swizzle(scales) if swizzled else padded(scales, 128, 4)
    return {
        f"{name}._rowwise_data": u8(b),
        f"{name}._rowwise_scale_inv": u8(held),
        f"{name}._amax_rowwise": ("F32", [1], np.float32(amax).tobytes()),
    }


def mlx(name: str, n: int, k: int, seed: int, amax: float | None) -> dict[str, Tensor]:
    b, scales = weight_bytes(n, k, seed)
    tensors = {f"{name}.weight": ("U32", [n, k // 8], b.tobytes()), f"{name}.scales": u8(scales)}
    return tensors if amax is None else tensors | {f"{name}.global_scale": f32(amax)}


def fouroversix(
    name: str, b: np.ndarray, scales: np.ndarray, amax: float, shape: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    codes = padded(b, 128, 32)
    held = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint8)
    held[: len(b), : scales.shape[1]] = scales
    sizes = np.array([*(shape or (len(b), 2 * b.shape[1])), len(codes), 2 * codes.shape[1]], np.int32)
    return {
        f"{name}.quantized_weight_values": u8(codes),
        f"{name}.quantized_weight_scale_factors": f8(swizzle(held).reshape(-1)),
        f"{name}.quantized_weight_amax": ("F32", [1], np.float32(amax).tobytes()),
        f"{name}.quantized_weight_metadata": ("I32", [4], sizes.tobytes()),
    }


def gguf_blocks(b: np.ndarray, scales: np.ndarray) -> bytes:
    """Type 40: in a block of 64 values the scales come first; low nibbles of a sub-block are its first 8 values."""
    codes = np.stack([b & 15, b >> 4], -1).reshape(*b.shape[:-1], -1, 16)
    held = (codes[..., :8] | codes[..., 8:] << 4).reshape(*b.shape[:-1], -1, 32)
    return np.concatenate([scales.reshape(*b.shape[:-1], -1, 4), held], -1).astype(np.uint8).tobytes()


def gguf_text(text: str) -> bytes:
    return len(text.encode()).to_bytes(8, "little") + text.encode()


def gguf_bytes(
    tensors: dict[str, tuple[int, list[int], bytes]], pairs: bytes = b"", pair_count: int = 0, alignment: int = 32
) -> bytes:
    """Tensors by name: type number, shape (outermost first), data."""
    infos, data = b"", b""
    for name, (number, shape, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        infos += gguf_text(name) + len(shape).to_bytes(4, "little")
        infos += b"".join(size.to_bytes(8, "little") for size in reversed(shape))
        infos += number.to_bytes(4, "little") + len(data).to_bytes(8, "little")
        data += raw
    head = b"GGUF" + (3).to_bytes(4, "little") + len(tensors).to_bytes(8, "little")
    head += pair_count.to_bytes(8, "little") + pairs + infos
    return head + bytes(-len(head) % alignment) + data
