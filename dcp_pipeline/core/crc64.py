"""CRC-64/NVME and its algebra: parts of a text that were hashed apart make the CRC of the whole.

A CRC is the remainder of a polynomial over GF(2). Taken raw (initial value 0, nothing inverted at
the end) it is linear: ``raw(a + b) = raw(a) * x**(8 * len(b)) XOR raw(b)``, and zero bytes in front
count nothing. So the raw CRC of a text is the XOR, over pieces of it in any order, of each piece's
raw CRC times ``x`` to the eight times the bytes that follow it. (Ross Williams, "A painless guide
to CRC error detection algorithms", 1993; the products as in zlib's ``crc32_combine``.)

Polynomials are reflected: bit 63 of a number is the coefficient of ``x**0``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Final

import numpy as np

__all__ = ["Words", "finished", "fold", "raw_crc64", "raw_crcs", "raw_crcs_of_short", "shift"]

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

_POLYNOMIAL: Final = 0x9A6C9329AC4BC9B5  # 0xAD93D23594C93659, reflected
_ALL: Final = (1 << 64) - 1
_ONE: Final = 1 << 63
_ONE_BYTE: Final = 1 << 55  # x**8
_FEW: Final = 8


@cache
def _library() -> Callable[[bytes | memoryview, int], int]:
    # When it is first needed: the library is large, and those who only look need none of it.
    from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]

    function: Callable[[bytes | memoryview, int], int] = crc64nvme
    return function


def raw_crc64(data: bytes | memoryview, raw: int = 0) -> int:
    """The raw CRC of ``data``, continued from ``raw``.

    >>> hex(finished(raw_crc64(b"123456789"), 9))
    '0xae8b14860a799888'
    """
    return _library()(data, raw ^ _ALL) ^ _ALL


def finished(raw: int, nbytes: int) -> int:
    """CRC-64/NVME of a text of ``nbytes`` bytes whose raw CRC is ``raw``."""
    return raw ^ _multiply(_ALL, _power(nbytes)) ^ _ALL


def shift(values: Words, nbytes: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Words:
    """Each of ``values`` as if so many bytes of zeros followed what it is the raw CRC of.

    Args:
        values, nbytes: ``[n]``; 0 bytes and more.
    """
    result = values.copy()
    if len(result) <= _FEW:
        numbers = zip(result.tolist(), nbytes.tolist(), strict=True)
        return np.asarray([_multiply(value, _power(count)) for value, count in numbers], np.uint64)
    for bit in range(int(nbytes.max()).bit_length()):
        rows = np.flatnonzero(nbytes >> bit & 1)
        result[rows] = _apply(_table(1 << bit), result[rows])
    return result


def fold(values: Words, nbytes: int) -> Words:
    """The raw CRCs of texts of equal pieces, ``nbytes`` from the end of each to that of the next.

    Args:
        values: ``[m, n]`` raw CRCs of the pieces, each text's in a row.

    Returns:
        ``[m]``, in the sense of :func:`shift` at the end of the last piece.
    """
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            # A piece of zeros in front changes nothing.
            values = np.concatenate([np.zeros((len(values), 1), np.uint64), values], axis=1)
        left = _apply(_table(nbytes), values[:, 0::2].reshape(-1))
        values = left.reshape(len(values), -1) ^ values[:, 1::2]
        nbytes *= 2
    return values[:, 0]


def raw_crcs(data: memoryview, nbytes: int) -> Words:
    """The raw CRCs of texts of ``nbytes`` each that lie one after another in ``data``."""
    function = _library()
    crcs = [function(data[at : at + nbytes], _ALL) for at in range(0, len(data), nbytes)]
    return np.asarray(crcs, np.uint64) ^ np.uint64(_ALL)


def raw_crcs_of_short(data: memoryview, nbytes: int) -> Words:
    """As :func:`raw_crcs`, side by side: for a great many texts of a few bytes."""
    count, width = len(data) // nbytes, -(-nbytes // 8) * 8
    padded = np.zeros((count, width), np.uint8)
    padded[:, width - nbytes :] = np.frombuffer(data, np.uint8).reshape(count, nbytes)
    return _apply(_table(8), fold(padded.view("<u8"), 8))


def _multiply(one: int, other: int) -> int:
    """The product of two polynomials, modulo the CRC's."""
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = one << 1 & _ALL
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
    return product


@lru_cache(maxsize=4096)
def _power(nbytes: int) -> int:
    """``x**(8 * nbytes)``, modulo the CRC's polynomial."""
    if nbytes == 0:
        return _ONE
    half = _power(nbytes // 2)
    square = _multiply(half, half)
    return _multiply(square, _ONE_BYTE) if nbytes % 2 else square


@lru_cache(maxsize=512)
def _table(nbytes: int) -> Words:
    """``[8, 256]``: what each value of each byte of a number adds to its product."""
    product, products = _power(nbytes), []
    for _ in range(64):
        products.append(product)
        product = product >> 1 ^ _POLYNOMIAL if product & 1 else product >> 1
    bits = np.asarray(products[::-1], np.uint64).reshape(8, 8)  # bit 0 is the highest power
    table = np.zeros((8, 256), np.uint64)
    for bit in range(8):
        table[:, 1 << bit : 2 << bit] = table[:, : 1 << bit] ^ bits[:, bit, None]
    return table


def _apply(table: Words, values: Words) -> Words:
    """``[n]`` numbers times what ``table`` multiplies with."""
    parts = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(-1, 8)
    result: Words = table[0].take(parts[:, 0])
    for byte in range(1, 8):
        result ^= table[byte].take(parts[:, byte])
    return result
