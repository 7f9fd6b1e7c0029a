"""The values of a checkpoint against the fingerprint in its manifest. No torch is needed.

Digests of blocks tell that the bytes of a file are those that were written. The fingerprint tells
that what the manifest says of them makes the values that were saved: it finds chunks that changed
places, and a manifest that was altered.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from dcp_pipeline.core.contributions import Contributions, fingerprints_of
from dcp_pipeline.core.fingerprint import Fingerprint, make_fingerprint
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.runs import Box
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.layout import names
from dcp_pipeline.tools.verify_report import Findings, KeyIndex

__all__ = ["ValueCheck"]


class ValueCheck:
    """Takes the fingerprint of every key while its bytes are read, by several threads.

    Args:
        is_tiled: whether the chunks tile their tensors; if not there is nothing to compare.
    """

    def __init__(
        self, manifest: Manifest, index: KeyIndex, findings: Findings, is_tiled: bool
    ) -> None:
        self._manifest = manifest
        self._index = index
        self._findings = findings
        self._recorded: Fingerprint | None = manifest.fingerprint if is_tiled else None
        self._words = np.zeros(len(manifest.table), np.uint64)
        self._seen = np.zeros(len(manifest.table), np.int64)
        self._order = np.argsort(manifest.table.key, kind="stable")
        self._lock = threading.Lock()

    def reading(self, file: int, begin: int, end: int) -> Reading | None:
        """For bytes of a file that are about to be read; ``None`` where nothing is recorded."""
        if self._recorded is None:
            return None
        table = self._manifest.table
        rows = self._index.between(file, begin, end)
        is_tensor = [
            table.keys[key].dtype is not None and row not in self._manifest.encoded
            for row, key in zip(rows.tolist(), table.key[rows].tolist(), strict=True)
        ]
        starts = (table.offset[rows] + table.payload[rows]).tolist()
        lengths = np.where(is_tensor, table.nbytes[rows], 0).tolist()
        items = table.item_sizes[rows].tolist()

        def box_of(chunk: int) -> Box:
            row = int(rows[chunk])
            return Box(table.keys[table.key[row]].shape, *table.boxes(row), items[chunk])

        return Reading(self, rows, Contributions(starts, lengths, box_of))

    def take(self, rows: Any, words: Any, nbytes: Any) -> None:
        """What a thread has read of some rows."""
        with self._lock:
            np.bitwise_xor.at(self._words, rows, words)
            np.add.at(self._seen, rows, nbytes)

    def is_recorded(self, row: int) -> bool:
        """Whether there is a fingerprint of the key of a row."""
        return self._of(row) is not None

    def compare_value(self, file: int, row: int, value: Any) -> None:
        """Compare a value that was read with its own fingerprint."""
        found = f"{value_digest(value) % (1 << 64):016x}"
        if self._of(row) not in (None, found):
            name, rank = self._manifest.files[file].name, self._index.rank(file)
            self._report(name, found, self._of(row), self._index.names(row), rank)

    def compare(self) -> None:
        """Compare all tensors whose bytes were read whole, and the state as a whole."""
        recorded, manifest = self._recorded, self._manifest
        if manifest.fingerprint is None:
            self._findings.note(
                "no fingerprint of the values was recorded: saved with fingerprint=false, through"
                " planners or writers of DCP's, or by a version that took none"
            )
        if recorded is None:
            return
        numbers = fingerprints_of(manifest.table, self._words)
        for key, (name, spec) in enumerate(zip(manifest.names, manifest.table.keys, strict=True)):
            if spec.dtype is not None and f"{numbers[key]:016x}" != recorded.of(name):
                rows = self._rows_of(key if spec.alias < 0 else spec.alias)
                if self._is_read_whole(rows):
                    self._report_tensor(key, numbers[key], rows)
        self._compare_whole(recorded)

    def _compare_whole(self, recorded: Fingerprint) -> None:
        manifest = self._manifest
        numbers = [int(recorded.of(name) or "0", 16) for name in manifest.names]
        found = make_fingerprint(manifest.names, manifest.table.keys, numbers).value
        if found != recorded.value:
            self._findings.add(
                names.MANIFEST,
                f"its keys, dtypes, shapes and fingerprints make the fingerprint {found}",
                f"{recorded.value}, which it says of the whole state",
            )

    def _of(self, row: int) -> str | None:
        name = self._manifest.names[self._manifest.table.key[row]]
        return None if self._recorded is None else self._recorded.of(name)

    def _report_tensor(self, key: int, number: int, rows: Any) -> None:
        assert self._recorded is not None
        key_name = self._manifest.names[key]
        found, wanted = f"{number:016x}", self._recorded.of(key_name)
        files = set(self._manifest.table.file[rows].tolist())
        if len(files) != 1:
            self._report(names.MANIFEST, found, wanted, (key_name,), None)
            return
        file = files.pop()
        keys, rank = self._index.names(int(rows[0])), self._index.rank(file)
        self._report(self._manifest.files[file].name, found, wanted, keys, rank)

    def _report(
        self, file: str, found: str, wanted: str | None, keys: tuple[str, ...], rank: int | None
    ) -> None:
        text = f"values have the fingerprint {found}: they are not those that were saved"
        self._findings.add(file, text, f"{wanted}, as the manifest says", keys, rank)

    def _rows_of(self, key: int) -> Any:
        low, high = np.searchsorted(self._manifest.table.key, [key, key + 1], sorter=self._order)
        return self._order[low:high]

    def _is_read_whole(self, rows: Any) -> bool:
        """Whether the bytes of these rows were read, and are those that were written."""
        table, findings = self._manifest.table, self._findings
        if (self._seen[rows] != table.nbytes[rows]).any():
            return False
        begins, ends = table.offset[rows], table.offset[rows] + table.length[rows]
        places = np.stack([table.file[rows], begins, ends], axis=1).tolist()
        return not any(findings.is_damaged(*place) for place in places)


class Reading:
    """One thread's part of a :class:`ValueCheck`."""

    def __init__(self, check: ValueCheck, rows: Any, taken: Contributions) -> None:
        self._check = check
        self._rows = rows
        self._taken = taken

    def add(self, position: int, data: memoryview) -> None:
        """Bytes of the file, from ``position`` on."""
        self._taken.add(position, data)

    def finish(self) -> None:
        """Hand over what was read."""
        self._check.take(self._rows, *self._taken.result())
