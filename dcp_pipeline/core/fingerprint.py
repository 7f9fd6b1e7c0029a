"""The fingerprint of a state: of its values, whatever ranks hold which parts of them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any, Final

import numpy as np

from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.path import encode_path
from dcp_pipeline.core.table import KeySpec, Kind

__all__ = ["Fingerprint", "decode_fingerprint", "encode_fingerprint", "make_fingerprint"]

_ALGORITHM: Final = "crc64nvme"
_HEX: Final = frozenset("0123456789abcdef")
_encode: Final = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Fingerprint:
    """What the values of a state come to, in any layout, on any number of ranks.

    Equal states have equal fingerprints. Against chance it is as good as 64 bits are; against
    somebody who wants two states to look alike it is none, since CRCs are easily forged.

    Attributes:
        value: of the whole state: 64 hexadecimal digits, what ``str`` gives.
        tensors: of every tensor, by name: CRC-64/NVME of its bytes, row-major and little endian, 16
            hexadecimal digits. NumPy arrays and scalars are among them, and both names of what is
            stored once.
        values: of every other value, by name: a hash of what it means; ``None`` where it has no
            typed JSON, such as an object of a class of yours.
    """

    value: str
    tensors: Mapping[str, str]
    values: Mapping[str, str | None]

    def __str__(self) -> str:
        return self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def of(self, name: str) -> str | None:
        """The fingerprint of one key; ``None`` where it has none.

        Raises:
            KeyError: there is no such key.
        """
        return self.tensors[name] if name in self.tensors else self.values[name]


def make_fingerprint(
    names: Sequence[str], specs: Sequence[KeySpec], numbers: Sequence[int]
) -> Fingerprint:
    """The fingerprint of a state whose keys have these.

    Args:
        names, specs, numbers: one for each key; 0 for a value that has none.
    """
    rows = zip(specs, numbers, strict=True)
    return _named(names, specs, numbers, _whole([_line(spec, number) for spec, number in rows]))


def _line(spec: KeySpec, number: int) -> str:
    """JSON, put together by hand: an encoder for each of many keys takes longer than their CRCs."""
    path = ",".join(
        [
            encode_basestring_ascii(part) if type(part) is str else _encode(encode_path((part,))[0])
            for part in spec.path
        ]
    )
    digits = _hex(spec, number)
    found = "null" if digits is None else f'"{digits}"'
    return f"[[{path}],{_type(spec.kind, spec.dtype, spec.shape)},{found}]"


@lru_cache(maxsize=1024)
def _type(kind: Kind, dtype: str | None, shape: tuple[int, ...]) -> str:
    return _encode([kind.value, dtype, None if dtype is None else shape])[1:-1]


def _whole(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode("ascii")).hexdigest()


def _hex(spec: KeySpec, number: int) -> str | None:
    return None if spec.dtype is None and not number else f"{number:016x}"


def _named(
    names: Sequence[str], specs: Sequence[KeySpec], numbers: Sequence[int], value: str
) -> Fingerprint:
    tensors: dict[str, str] = {}
    values: dict[str, str | None] = {}
    for name, spec, number in zip(names, specs, numbers, strict=True):
        if spec.dtype is None:
            values[name] = _hex(spec, number)
        else:
            tensors[name] = f"{number:016x}"
    return Fingerprint(value, tensors, values)


def encode_fingerprint(fingerprint: Fingerprint, names: Sequence[str]) -> dict[str, object]:
    """A fingerprint as a member of a manifest whose keys have ``names``."""
    known = {**fingerprint.values, **fingerprint.tensors}
    digits = bytes.fromhex("".join([known[name] or "0" * 16 for name in names]))
    packed = base64.b64encode(np.frombuffer(digits, ">u8").astype("<u8").tobytes())
    return {"algorithm": _ALGORITHM, "state": fingerprint.value, "keys": packed.decode("ascii")}


def decode_fingerprint(
    member: Mapping[str, Any] | None, names: Sequence[str], specs: Sequence[KeySpec]
) -> Fingerprint | None:
    """The inverse of :func:`encode_fingerprint`; ``None`` where there is none that is known here.

    Raises:
        FormatError: it does not fit the keys.
    """
    if member is None or member["algorithm"] != _ALGORITHM:
        return None
    value, packed = member["state"], base64.b64decode(member["keys"], validate=True)
    if not isinstance(value, str) or len(value) != 64 or not _HEX.issuperset(value):
        raise FormatError(f"not the fingerprint of a state: {str(value)[:80]!r}")
    if len(packed) != 8 * len(names):
        raise FormatError(f"fingerprints of {len(packed) // 8} keys, there are {len(names)}")
    return _named(names, specs, np.frombuffer(packed, "<u8").tolist(), value)
