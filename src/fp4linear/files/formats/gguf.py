"""GGUF files (type 40 holds NVFP4), recognised by their magic."""

from __future__ import annotations

from pathlib import Path

NAME = "GGUF"
REASON = "its NVFP4 blocks (64 values in 36 bytes) are not supported yet"


def recognises(head: bytes, path: Path) -> bool:
    return head.startswith(b"GGUF")
