"""The header of a safetensors file, made and parsed without torch and without trusting it.

A file is eight bytes of length, a JSON header of that many bytes, and the payloads without holes.
The header is read by a scanner of its own grammar, not by a JSON parser: a hundred megabytes of
nested lists would cost gigabytes and minutes before it could be refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dcp_pipeline.core.errors import FormatError, UnsafeCheckpointError, UnsupportedLeafError

__all__ = [
    "SafetensorsHeader",
    "StoredEntry",
    "TensorEntry",
    "encode_header",
    "parse_header",
    "storage_dtype",
    "storage_shape",
    "torch_dtype_and_shape",
]

_MAX_HEADER = 100_000_000  # the official library's limit
_MAX_DIMENSIONS = 1024
_LIMIT = 1 << 63
_FIRST_READ = 64 * 1024
_CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
_NAMES = {code: name for name, code in _CODES.items()}
_PAIRS = {"complex32": "F16", "complex128": "F64"}
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written: key, dtype as torch names it ("float32"), sizes, bytes of payload."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A tensor of a file.

    Attributes:
        name: its key.
        code: its dtype as safetensors names it ("F32").
        shape: its sizes as the file names them, see ``torch_dtype_and_shape``.
        begin: where its payload starts, in bytes from the start of the file.
        end: where its payload ends.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The entries of a file in the order of their payloads, its metadata, where payloads start."""

    entries: tuple[StoredEntry, ...]
    metadata: dict[str, str]
    data_start: int


def storage_dtype(dtype_name: str) -> tuple[str, tuple[int, ...]]:
    """The safetensors code for a torch dtype, and the dimensions to append to the shape.

    complex32 and complex128 have no code: they are stored as pairs ``(real, imaginary)`` of F16 and
    F64, which the caller must note down, since the file cannot tell them from real tensors.
    float4_e2m1fn_x2 holds two elements a byte, so its last size is doubled (``storage_shape``).

    Raises:
        UnsupportedLeafError: safetensors has no code for the dtype.

    Example:
        >>> storage_dtype("bfloat16"), storage_dtype("complex128")
        (('BF16', ()), ('F64', (2,)))
    """
    if dtype_name in _PAIRS:
        return _PAIRS[dtype_name], (2,)
    if dtype_name not in _CODES:
        raise UnsupportedLeafError(
            f"a tensor of torch.{dtype_name}, which cannot be put in safetensors"
        )
    return _CODES[dtype_name], ()


def storage_shape(dtype_name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape that the file names for a tensor of ``shape``; a float4 scalar becomes ``(2,)``."""
    _, trailing = storage_dtype(dtype_name)
    if dtype_name == "float4_e2m1fn_x2":
        return (*shape[:-1], 2 * shape[-1]) if shape else (2,)
    return (*shape, *trailing)


def torch_dtype_and_shape(code: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The torch dtype's name and the sizes of a stored tensor, as the official library gives them.

    Raises:
        FormatError: torch has no such dtype, or the shape does not fill its bytes.
    """
    name = _NAMES.get(code)
    if name is None:
        raise FormatError(f"torch has no dtype for {code} of safetensors")
    if code != "F4":
        return name, tuple(shape)
    if not shape or shape[-1] % 2:
        raise FormatError(f"F4 of the shape {list(shape)} does not fill bytes of two elements")
    return name, (*shape[:-1], shape[-1] // 2)


def encode_header(
    entries: Sequence[TensorEntry], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """The start of a file and where each payload begins, in bytes from the start of the file.

    Payloads follow each other without holes in the order given, the first at a multiple of 8.

    Raises:
        UnsupportedLeafError: a name or dtype that safetensors cannot hold, a name given twice,
            bytes that disagree with dtype and shape, or a header of more than 100 MB.

    Example:
        >>> start, offsets = encode_header([TensorEntry("a", "int8", (3,), 3)], {})
        >>> start[8:], offsets
        (b'{"a":{"dtype":"I8","shape":[3],"data_offsets":[0,3]}}   ', [64])
    """
    parts, begins, begin = [], [], 0
    if metadata:
        parts.append('"__metadata__":' + _dump_metadata(metadata))
    seen = {"__metadata__"}
    for entry in entries:
        if entry.name in seen:
            raise UnsupportedLeafError(f"safetensors cannot hold {entry.name!r} here: it is taken")
        seen.add(entry.name)
        code, _ = storage_dtype(entry.dtype_name)
        shape = storage_shape(entry.dtype_name, entry.shape)
        if prod(shape) * _BITS[code] != 8 * entry.nbytes or min(shape, default=0) < 0:
            raise UnsupportedLeafError(
                f"{entry.name!r} of {entry.dtype_name} and sizes {list(entry.shape)} has "
                f"{entry.nbytes} bytes"
            )
        end = begin + entry.nbytes
        sizes = ",".join(map(str, shape))
        parts.append(
            f'{_dump_text(entry.name)}:{{"dtype":"{code}","shape":[{sizes}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        begins.append(begin)
        begin = end
    header = ("{" + ",".join(parts) + "}").encode("utf-8")
    header += b" " * (-len(header) % 8)
    if len(header) > _MAX_HEADER:
        raise UnsupportedLeafError(
            f"a safetensors header of {len(header)} bytes, at most {_MAX_HEADER} can be read back"
        )
    start = 8 + len(header)
    return len(header).to_bytes(8, "little") + header, [start + begin for begin in begins]


def _dump_text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnsupportedLeafError(f"safetensors cannot hold the text {text!r}") from error
    return json.dumps(text, ensure_ascii=False)


def _dump_metadata(metadata: Mapping[str, str]) -> str:
    pairs = (f"{_dump_text(key)}:{_dump_text(text)}" for key, text in metadata.items())
    return "{" + ",".join(pairs) + "}"


def parse_header(read: Callable[[int, int], bytes], file_size: int) -> SafetensorsHeader:
    """The header of a file, after every check that the official library makes, and more.

    Args:
        read: ``(offset, nbytes)`` to bytes of the file.
        file_size: bytes of the file.

    Raises:
        FormatError: malformed, truncated, or ranges that overlap, leave holes or disagree with
            dtype and shape.
        UnsafeCheckpointError: a header of more than 100 MB, or absurd sizes.
    """
    first = _take(read, 0, min(file_size, _FIRST_READ))
    if len(first) < 8:
        raise FormatError(f"{file_size} bytes are too few for a safetensors file")
    length = int.from_bytes(first[:8], "little")
    if length > _MAX_HEADER:
        raise UnsafeCheckpointError(f"a safetensors header claims {length} bytes")
    start = 8 + length
    if start > file_size:
        raise FormatError(f"a safetensors header of {length} bytes in a file of {file_size}")
    rest = _take(read, len(first), start - len(first)) if start > len(first) else b""
    header = first[8:start] + rest
    entries, metadata = _scan(header, start)
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    at = start
    for entry in entries:
        if entry.begin != at:
            kind = "leave a hole before" if entry.begin > at else "overlap at"
            raise FormatError(f"the payloads of a safetensors file {kind} {entry.name!r}")
        at = entry.end
    if at != file_size:
        raise FormatError(f"the payloads of a safetensors file of {file_size} bytes end at {at}")
    return SafetensorsHeader(tuple(entries), metadata, start)


def _take(read: Callable[[int, int], bytes], offset: int, nbytes: int) -> bytes:
    got = bytes(read(offset, nbytes))
    if len(got) != nbytes:
        raise FormatError(f"truncated: {len(got)} of {nbytes} bytes at offset {offset}")
    return got


_TEXT = rb'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrtu])*+"'
_GAP = rb"[ \t\r\n]*+"
_KEY = re.compile(_GAP + b"(" + _TEXT + b")" + _GAP + b":" + _GAP)
_STRING = re.compile(b"(" + _TEXT + b")" + _GAP)
_LIST = re.compile(rb"\[([0-9, \t\r\n-]*+)\]" + _GAP)
_OPEN, _COMMA, _CLOSE, _NULL = (
    re.compile(_GAP + mark + _GAP) for mark in (rb"\{", b",", rb"\}", b"null")
)
_NUMBER = re.compile(rb"0|[1-9][0-9]*")


class _Scanner:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.pos = 0

    def skip(self, pattern: re.Pattern[bytes]) -> bool:
        match = pattern.match(self.data, self.pos)
        if match:
            self.pos = match.end()
        return match is not None

    def need(self, pattern: re.Pattern[bytes], what: str) -> bytes:
        match = pattern.match(self.data, self.pos)
        if match is None:
            raise FormatError(f"a safetensors header without {what} at byte {self.pos}")
        self.pos = match.end()
        return match.group(match.lastindex or 0)

    def keys(self) -> list[str]:
        """Not all keys: none if the object just opened is empty, else the first of them."""
        return [] if self.skip(_CLOSE) else [_string(self.need(_KEY, "a key"))]

    def next_key(self) -> list[str]:
        if self.skip(_COMMA):
            return [_string(self.need(_KEY, "a key"))]
        self.need(_CLOSE, "a comma or a closing brace")
        return []


def _string(raw: bytes) -> str:
    try:
        text = str(json.loads(raw)) if b"\\" in raw else raw[1:-1].decode("utf-8")
        if not text.isascii():
            text.encode("utf-8")  # a lone surrogate of an escape
    except ValueError as error:
        raise FormatError(f"malformed text in a safetensors header: {raw[:80]!r}") from error
    return text


def _numbers(raw: bytes, what: str, name: str) -> tuple[int, ...]:
    if not raw.strip():
        return ()
    parts = raw.split(b",", _MAX_DIMENSIONS)
    if len(parts) > _MAX_DIMENSIONS:
        raise UnsafeCheckpointError(f"{what} of {name!r} has more than {_MAX_DIMENSIONS} numbers")
    numbers = []
    for part in map(bytes.strip, parts):
        if _NUMBER.fullmatch(part) is None:
            raise FormatError(f"{what} of {name!r} holds {part[:40]!r}, expected a count")
        if len(part) > 19 or (number := int(part)) >= _LIMIT:
            raise UnsafeCheckpointError(f"{what} of {name!r} holds {part[:40].decode()}")
        numbers.append(number)
    return tuple(numbers)


def _scan(header: bytes, start: int) -> tuple[list[StoredEntry], dict[str, str]]:
    scan = _Scanner(header)
    entries: list[StoredEntry] = []
    metadata: dict[str, str] = {}
    seen: set[str] = set()
    scan.need(_OPEN, "an opening brace")
    keys = scan.keys()
    while keys:
        (name,) = keys
        if name in seen:
            raise FormatError(f"a safetensors header names {name!r} twice")
        seen.add(name)
        if name == "__metadata__":
            metadata = _scan_metadata(scan)
        else:
            entries.append(_scan_entry(scan, name, start))
        keys = scan.next_key()
    if scan.pos != len(header):
        raise FormatError("a safetensors header goes on after its closing brace")
    return entries, metadata


def _scan_metadata(scan: _Scanner) -> dict[str, str]:
    metadata: dict[str, str] = {}
    if scan.skip(_NULL):
        return metadata
    scan.need(_OPEN, "metadata")
    keys = scan.keys()
    while keys:
        if keys[0] in metadata:
            raise FormatError(f"a safetensors header names the metadata {keys[0]!r} twice")
        metadata[keys[0]] = _string(scan.need(_STRING, "a string"))
        keys = scan.next_key()
    return metadata


def _scan_entry(scan: _Scanner, name: str, start: int) -> StoredEntry:
    found: dict[str, bytes] = {}
    scan.need(_OPEN, "a tensor")
    keys = scan.keys()
    while keys:
        (field,) = keys
        if field in found or field not in ("dtype", "shape", "data_offsets"):
            raise FormatError(f"the tensor {name!r} has the field {field[:80]!r}, or has it twice")
        found[field] = scan.need(_STRING if field == "dtype" else _LIST, f"the {field}")
        keys = scan.next_key()
    if len(found) != 3:
        raise FormatError(f"the tensor {name!r} lacks dtype, shape or data_offsets")
    code = _string(found["dtype"])
    bits = _BITS.get(code)
    if bits is None:
        raise FormatError(f"the tensor {name!r} has the unknown dtype {code[:80]!r}")
    shape = _numbers(found["shape"], "the shape", name)
    offsets = _numbers(found["data_offsets"], "data_offsets", name)
    numel = 1
    for size in shape:
        numel *= size
        if numel >= _LIMIT:
            raise UnsafeCheckpointError(f"the tensor {name!r} has absurdly many elements")
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != numel * bits:
        raise FormatError(
            f"the tensor {name!r} of {code} and shape {list(shape)} lies at {list(offsets)}, "
            f"expected {numel * bits / 8:g} bytes"
        )
    return StoredEntry(name, code, shape, start + offsets[0], start + offsets[1])
