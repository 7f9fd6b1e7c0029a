"""What a verification found: problems with file, keys and rank, and what could not be checked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from dcp_pipeline.core.errors import list_some
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.packing import Column

__all__ = ["Findings", "KeyIndex", "Problem", "Progress", "VerifyReport"]

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and the bytes to read, from one thread at a time."""

_MAX_PROBLEMS = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it was written.

    Attributes:
        file: its name in the directory, empty where no single file is at fault.
        found: what is there.
        expected: what should be, empty where ``found`` says it all.
        keys: stored names of what is hit; none for bytes that only frame items.
        rank: that wrote the file, ``None`` where that is not recorded.
    """

    file: str
    found: str
    expected: str = ""
    keys: tuple[str, ...] = ()
    rank: int | None = None

    def __str__(self) -> str:
        place = self.file if self.rank is None else f"{self.file} of rank {self.rank}"
        expected = f"; expected {self.expected}" if self.expected else ""
        keys = f"; it holds {list_some(self.keys, 5)}" if self.keys else ""
        return f"{place + ': ' if place else ''}{self.found}{expected}{keys}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What every byte of a checkpoint came to.

    Attributes:
        path: its directory.
        kind: ``dcp_pipeline``, ``plain DCP``, or ``not committed``.
        save_id: of a checkpoint of ours, empty for others.
        problems: what is wrong, by file.
        notes: what is no harm but worth knowing, such as files of dead saves.
        not_verified: what has no digest to compare with, and why.
        files: how many were read whole.
        nbytes: bytes that were read.
        keys, chunks: how many the checkpoint holds.
        fingerprint: of the values, as the manifest has it; ``None`` where it has none.
    """

    path: str
    kind: str
    save_id: str
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    not_verified: tuple[str, ...]
    files: int
    nbytes: int
    keys: int
    chunks: int
    fingerprint: str | None = None

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass
class Findings:
    """Gathers a report; several threads add to it.

    Attributes:
        damaged: file number to ranges ``(begin, end)`` that are not what was written.
    """

    total_bytes: int = 0
    progress: Progress | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_verified: list[str] = field(default_factory=list)
    damaged: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    files: int = 0
    nbytes: int = 0
    left_out: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        file: str,
        found: object,
        expected: str = "",
        keys: tuple[str, ...] = (),
        rank: int | None = None,
    ) -> None:
        """Note a problem, once."""
        problem = Problem(file, str(found), expected, keys, rank)
        with self._lock:
            if len(self.problems) >= _MAX_PROBLEMS:
                self.left_out += 1
            elif problem not in self.problems:
                self.problems.append(problem)

    def note(self, text: str) -> None:
        """Note what is no problem."""
        if text not in self.notes:
            self.notes.append(text)

    def cannot_verify(self, text: str) -> None:
        """Note what there is nothing to compare with."""
        with self._lock:
            if text not in self.not_verified and len(self.not_verified) < _MAX_PROBLEMS:
                self.not_verified.append(text)

    def mark_damaged(self, file: int, begin: int, end: int) -> None:
        """Note bytes of a data file that say nothing any more."""
        with self._lock:
            self.damaged.setdefault(file, []).append((begin, end))

    def is_damaged(self, file: int, begin: int, end: int) -> bool:
        """Whether a range of a data file has bytes that say nothing any more."""
        return any(low < end and begin < high for low, high in self.damaged.get(file, ()))

    def count(self, nbytes: int) -> None:
        """Note that bytes were read."""
        with self._lock:
            self.nbytes += nbytes
            if self.progress is not None:
                self.progress(self.nbytes, self.total_bytes)

    def count_file(self) -> None:
        """Note that a file was read whole."""
        with self._lock:
            self.files += 1

    def report(self, path: str, kind: str, manifest: Manifest | None) -> VerifyReport:
        """Everything that was noted."""
        if self.left_out:
            self.note(f"{self.left_out} further problems are left out")
        return VerifyReport(
            path=path,
            kind=kind,
            save_id="" if manifest is None else manifest.save_id,
            problems=tuple(sorted(self.problems, key=lambda problem: problem.file)),
            notes=tuple(self.notes),
            not_verified=tuple(self.not_verified),
            files=self.files,
            nbytes=self.nbytes,
            keys=0 if manifest is None else len(manifest.names),
            chunks=0 if manifest is None else len(manifest.table),
            fingerprint=None
            if manifest is None or manifest.fingerprint is None
            else manifest.fingerprint.value,
        )


class KeyIndex:
    """Which keys lie where in the data files of a manifest, and who wrote them."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        table = manifest.table
        self._order = np.lexsort([table.offset, table.file])
        self._starts = np.searchsorted(table.file[self._order], np.arange(len(manifest.files) + 1))
        self._aliases: dict[int, list[int]] = {}
        for key, spec in enumerate(table.keys):
            if spec.alias >= 0:
                self._aliases.setdefault(spec.alias, []).append(key)

    def rows(self, file: int) -> list[int]:
        """The rows of the chunk table whose items lie in a file, by offset."""
        return [int(row) for row in self._order[self._starts[file] : self._starts[file + 1]]]

    def names(self, row: int) -> tuple[str, ...]:
        """The key of a row, and those that share its storage."""
        key = int(self._manifest.table.key[row])
        return tuple(self._manifest.names[k] for k in (key, *self._aliases.get(key, ())))

    def at(self, file: int, begin: int, end: int) -> tuple[str, ...]:
        """The keys that have bytes in a range of a file."""
        rows = self.between(file, begin, end).tolist()
        return tuple(dict.fromkeys(name for row in rows for name in self.names(row)))

    def between(self, file: int, begin: int, end: int) -> Column:
        """The rows that have bytes in a range of a file, by offset."""
        table = self._manifest.table
        rows = self._order[self._starts[file] : self._starts[file + 1]]
        hit = (table.offset[rows] < end) & (table.offset[rows] + table.length[rows] > begin)
        return rows[hit]

    def rank(self, file: int) -> int | None:
        """The rank that wrote a file; ``None`` for plain DCP, which does not say."""
        rows = self._order[self._starts[file] : self._starts[file + 1]]
        if self._manifest.is_foreign or not len(rows):
            return None
        return int(self._manifest.table.owner[rows[0]])
