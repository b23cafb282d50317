"""A fuzzer's bytes read as decisions. No bytes left reads as zeros, so that every input is a whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

# Sizes at which arithmetic goes wrong, and edges of the formats' blocks, tiles and limits.
SIZES = (
    0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 24, 31, 32, 33, 36, 48, 63, 64, 65, 127, 128, 129, 255, 256, 1024, 4096, 65535,
    65536, 65537, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**48, 2**53, 2**59, 2**60, 2**61, 2**62,
    2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**65, -1, -2, -(2**31), -(2**63),
)  # fmt: skip
# What stands where a number, a string or a list belongs.
NONSENSE: tuple[Any, ...] = (
    None, True, False, 1.0, 1.5, 1e308, -0.0, "", "4", "U8", "\ud800", "\0", "é" * 300, [], [[]], {}, {"a": 1},
    [1, 2, 3], [0] * 40, 10**19, 10**30,
)  # fmt: skip


class Choices:
    """Decisions by the input's bytes, in order."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        value = self.data[self.at] if self.at < len(self.data) else 0
        self.at += 1
        return value

    def below(self, count: int) -> int:
        """0 .. count - 1."""
        value = self.byte()
        while count > 256:
            value, count = value << 8 | self.byte(), count >> 8
        return value % max(count, 1)

    def one_in(self, count: int) -> bool:
        """False where the bytes have run out."""
        return self.byte() % count == count - 1

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def take(self, count: int) -> bytes:
        value = self.data[self.at : self.at + count]
        self.at += count
        return value

    def rest(self) -> bytes:
        return self.take(max(0, len(self.data) - self.at))

    def size(self) -> int:
        return self.pick(SIZES)

    def near(self, value: int) -> int:
        """A number beside another, or its double, its half, its complement."""
        how = self.below(8)
        return (value + 1, value - 1, value + 16, 2 * value, value // 2, -value, value ^ (1 << self.below(64)), value)[
            how
        ]

    def number(self, value: int) -> int:
        return self.size() if self.one_in(2) else self.near(value)

    def damaged(self, data: bytes) -> bytes:
        """The bytes with some changed, cut, doubled or made special."""
        if not data:
            return self.take(self.below(20))
        for _ in range(1 + self.below(4)):
            at = self.below(len(data))
            how = self.below(7)
            if how == 0:
                data = data[:at] + bytes([self.byte()]) + data[at + 1 :]
            elif how == 1:
                data = data[:at]
            elif how == 2:
                data = data[:at] + self.take(self.below(9)) + data[at:]
            elif how == 3:
                data = data[:at] + data[at + 1 + self.below(9) :]
            elif how == 4:
                width = self.pick((1, 2, 4, 8))
                value = self.size() & (256**width - 1)
                data = data[:at] + value.to_bytes(width, self.pick(("little", "big"))) + data[at + width :]
            elif how == 5:
                data = data[:at] + bytes([data[at] ^ 1 << self.below(8)]) + data[at + 1 :]
            else:
                data = data[:at] + data[at:] * 2
            if not data:
                break
        return data
