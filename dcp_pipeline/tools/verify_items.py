"""What lies in the data files against what the commit record says of it, item by item.

Torch is imported for zip items alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dcp_pipeline.core.checksum import crc32
from dcp_pipeline.core.errors import CheckpointError, list_some
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.formats.safetensors import (
    StoredEntry,
    parse_header,
    storage_dtype,
    storage_shape,
)
from dcp_pipeline.formats.typed_json import decode
from dcp_pipeline.formats.zip_directory import Window, payload_offset, read_directory
from dcp_pipeline.storage.base import Directory, Source
from dcp_pipeline.tools.verify_blocks import in_threads
from dcp_pipeline.tools.verify_report import Findings, KeyIndex
from dcp_pipeline.tools.verify_values import ValueCheck

__all__ = ["check_items"]

_MAX_RECORDS = 1_000_000
_STEP_BYTES = 4 << 20
_TASK_ROWS = 256


@dataclass(frozen=True)
class _Check:
    """A manifest whose items are looked into."""

    directory: Directory
    manifest: Manifest
    index: KeyIndex
    findings: Findings
    values: ValueCheck | None

    def problem(self, file: int, row: int, found: object, expected: str = "") -> None:
        self.findings.add(
            self.manifest.files[file].name,
            found,
            expected,
            self.index.names(row),
            self.index.rank(file),
        )

    def rows(self, file: int) -> list[int]:
        """Rows of a file whose bytes are as they were written."""
        table = self.manifest.table
        return [
            row
            for row in self.index.rows(file)
            if not self.findings.is_damaged(
                file, int(table.offset[row]), int(table.offset[row] + table.length[row])
            )
        ]


def check_items(
    directory: Directory,
    manifest: Manifest,
    index: KeyIndex,
    findings: Findings,
    threads: int,
    values: ValueCheck | None = None,
) -> None:
    """Look into every item that is not known to be damaged.

    Items of plain DCP have no digest but the CRCs of their zip records, which are compared.

    Args:
        values: compares those that are no tensors.
    """
    check = _Check(directory, manifest, index, findings, values)
    files = range(len(manifest.files))
    if manifest.serialization == "safetensors":
        in_threads(threads, "verify", _check_safetensors, [(check, file) for file in files])
    elif manifest.serialization == "torch_save":
        tasks = []
        for file in files:
            rows = check.rows(file)
            tasks += [
                (check, file, rows[at : at + _TASK_ROWS]) for at in range(0, len(rows), _TASK_ROWS)
            ]
        in_threads(threads, "verify", _check_zips, tasks)
    else:
        findings.cannot_verify(
            f"what the items hold: serialization {manifest.serialization!r} is not known here"
        )


def _reader(source: Source, begin: int = 0) -> Callable[[int, int], bytes]:
    def read(offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        source.read_into(begin + offset, memoryview(data))
        return bytes(data)

    return read


def _check_safetensors(check: _Check, file: int) -> None:
    entry = check.manifest.files[file]
    # Of a header that is damaged nothing can be said but that it is, and that was said.
    if check.findings.is_damaged(file, 0, 1):
        return
    try:
        with check.directory.open(entry.name) as source:
            header = parse_header(_reader(source), source.size)
            if check.findings.is_damaged(file, 0, header.data_start):
                return
            stored = {
                tensor.begin: tensor for tensor in header.entries if tensor.end > tensor.begin
            }
            for row in check.rows(file):
                _check_stored(
                    check, file, row, stored.pop(_begin(check.manifest, row), None), source
                )
    except CheckpointError as error:
        if not check.findings.damaged.get(file):
            check.findings.add(entry.name, error, "a safetensors file", (), check.index.rank(file))
        return
    if stored and not check.findings.damaged.get(file):
        names = ", ".join(sorted(tensor.name for tensor in stored.values())[:5])
        check.findings.add(entry.name, f"it holds {names}, which the manifest does not know")


def _begin(manifest: Manifest, row: int) -> int:
    return int(manifest.table.offset[row] + manifest.table.payload[row])


def _check_stored(
    check: _Check, file: int, row: int, stored: StoredEntry | None, source: Source
) -> None:
    table = check.manifest.table
    key = int(table.key[row])
    spec, name = table.keys[key], check.manifest.names[key]
    length = int(table.length[row] - table.payload[row])
    if stored is None:
        check.problem(
            file, row, "its header has no tensor there", f"{name} at {_begin(check.manifest, row)}"
        )
        return
    if spec.dtype is None:
        code, shape = "U8", storage_shape("uint8", (length,))
    else:
        code, shape = storage_dtype(spec.dtype)[0], storage_shape(spec.dtype, table.boxes(row)[1])
    found = (stored.code, stored.shape, stored.end - stored.begin)
    if found != (code, shape, length) or not stored.name.startswith(name):
        check.problem(
            file,
            row,
            f"its header has {stored.name} {stored.code} {list(stored.shape)}",
            f"{name} {code} {list(shape)}",
        )
    elif spec.dtype is None:
        try:
            value = decode(_reader(source)(stored.begin, length))
            if check.values is not None:
                check.values.compare_value(file, row, value)
        except CheckpointError as error:
            check.problem(file, row, error, "typed JSON")


def _check_zips(check: _Check, file: int, rows: Sequence[int]) -> None:
    name = check.manifest.files[file].name
    try:
        with check.directory.open(name) as source:
            for row in rows:
                try:
                    _check_zip(check, file, row, source)
                except CheckpointError as error:
                    check.problem(file, row, error, "an item as torch.save writes it")
    except CheckpointError as error:
        check.findings.add(name, error, "", (), check.index.rank(file))


def _check_zip(check: _Check, file: int, row: int, source: Source) -> None:
    table = check.manifest.table
    spec = table.keys[table.key[row]]
    offset, length = int(table.offset[row]), int(table.length[row])
    read = _reader(source, offset)
    if spec.dtype is None:
        _check_value(check, file, row, Window(read, length))
    else:
        _check_tensor(check, file, row, read)
    if check.manifest.is_foreign:
        _check_crcs(check, file, row, source)


def _check_value(check: _Check, file: int, row: int, window: Window) -> None:
    from dcp_pipeline.formats.torch_values import read_value
    from dcp_pipeline.formats.value_guard import globals_of_value, pickle_of_value

    config = check.manifest.config.get("serialization")
    if isinstance(config, Mapping) and config.get("trusted"):
        read_directory(window, _MAX_RECORDS)
        check.findings.cannot_verify(
            "what is in the values: they were saved with trusted=true, as pickles of any kind"
        )
        return
    unknown = globals_of_value(pickle_of_value(window)).unknown
    if unknown and check.manifest.is_foreign:
        check.findings.cannot_verify(
            f"whether values that name {list_some(sorted(unknown), 5)} can be unpickled: only what"
            " serialization.safe_globals admits is, or anything with trusted=true"
        )
    if not unknown and check.values is not None and check.values.is_recorded(row):
        data = window.take(0, int(check.manifest.table.length[row]))
        check.values.compare_value(file, row, read_value(data))


def _check_tensor(check: _Check, file: int, row: int, read: Callable[[int, int], bytes]) -> None:
    from dcp_pipeline.formats.torch_zip import parse_tensor_zip
    from dcp_pipeline.types.dtypes import dtype_name

    table = check.manifest.table
    spec, sizes = table.keys[table.key[row]], table.boxes(row)[1]
    stored = parse_tensor_zip(read, int(table.length[row]))
    if dtype_name(stored.dtype) != spec.dtype or stored.sizes != sizes:
        record = ".metadata" if check.manifest.is_foreign else "the manifest"
        check.problem(
            file,
            row,
            f"an item is {dtype_name(stored.dtype)} {list(stored.sizes)}",
            f"{spec.dtype} {list(sizes)}, as {record} says",
        )
    elif not check.manifest.is_foreign and (
        not stored.is_contiguous or stored.payload_offset != int(table.payload[row])
    ):
        check.problem(
            file,
            row,
            f"the elements of an item start at its byte {stored.payload_offset}",
            f"byte {int(table.payload[row])}, as the manifest says",
        )


def _check_crcs(check: _Check, file: int, row: int, source: Source) -> None:
    """Compare the CRCs of a zip's records with their bytes, which are read in small steps."""
    table = check.manifest.table
    begin, length = int(table.offset[row]), int(table.length[row])
    window = Window(_reader(source, begin), length)
    good, bad = 0, []
    for record in read_directory(window, _MAX_RECORDS):
        start = begin + payload_offset(window, record)
        found, buffer = 0, bytearray(min(_STEP_BYTES, record.size))
        for at in range(0, record.size, _STEP_BYTES):
            view = memoryview(buffer)[: min(_STEP_BYTES, record.size - at)]
            source.read_into(start + at, view)
            found = crc32(view, found)
            check.findings.count(len(view))
        if found == record.crc32:
            good += 1
        else:
            bad.append(record.name)
    if not bad:
        return
    if good:
        check.problem(file, row, f"the CRC of {', '.join(bad[:3])} does not match its bytes")
    else:
        # torch.serialization.set_crc32_options(False) writes records so.
        check.findings.cannot_verify(
            "items whose zip records all have CRCs that are not of their bytes: they were written"
            " without (torch.serialization.set_crc32_options)"
        )
