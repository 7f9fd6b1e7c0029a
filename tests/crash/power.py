"""Loss of power: what a disk may hold when it stops, played back from the log of a save's changes.

The model. A directory is a table of names, a file is its bytes; each is in memory and on the disk.

- A write, a reservation and a truncation change the bytes in memory. A sync of the file brings
  them to the disk, and not the file's name.
- A creation, a rename, a link and a removal change the table in memory. A sync of the directory
  brings all of them to the disk. A rename reaches the disk as one step, as POSIX has it; different
  changes of one directory reach it in any order or not at all, which is more than journals allow.

The power is lost after each change in turn. Of what was not synced by then, the adversaries let
these reach the disk. Of the changes to names: none, all, each one alone, all but each one. Of the
bytes: none, all, or zeros where they would be (the length is there, the data is not). What was
synced is there in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["BYTES", "Change", "Disk", "Log", "images"]

BYTES = ("lost", "kept", "zeros")
"""What becomes of bytes that were not synced."""


@dataclass(frozen=True)
class Change:
    """One change: its method, the path or the file's number, and what it does.

    Attributes:
        method: of ``FileChanges``.
        path: of the name that is changed, relative to the root of the log.
        file: number of the file that is changed or made, where there is one.
        source: the old path of a rename.
        offset, data: of a write; ``offset`` is the size for ``truncate`` and ``reserve``.
    """

    method: str
    path: str = ""
    file: int = -1
    source: str = ""
    offset: int = 0
    data: bytes = b""

    def encode(self) -> dict[str, object]:
        """As JSON."""
        return {**vars(self), "data": self.data.hex()}

    @classmethod
    def decode(cls, record: dict[str, object]) -> Change:
        """The reverse of :meth:`encode`."""
        fields = dict(record)
        return cls(**{**fields, "data": bytes.fromhex(str(fields["data"]))})  # type: ignore[arg-type]


Log = Sequence[Change]
Entry = tuple[str, int | str]
"""``("file", number)``, ``("link", text)`` or ``("directory", path)``."""
Step = dict[str, Entry | None]
"""A change of a directory that reaches the disk as one: names and what they become."""


@dataclass
class Disk:
    """A file system in memory and on the disk.

    Attributes:
        bytes_now, bytes_synced: of each file, by its number.
        synced: the tables on the disk, by the directory's path.
        pending: the steps of each directory since it was synced.
    """

    bytes_now: dict[int, bytes] = field(default_factory=dict)
    bytes_synced: dict[int, bytes] = field(default_factory=dict)
    synced: dict[str, dict[str, Entry]] = field(default_factory=lambda: {"": {}})
    pending: dict[str, list[Step]] = field(default_factory=dict)

    @classmethod
    def holding(cls, root: Path) -> Disk:
        """A disk on which everything below ``root`` is safe. Its files have negative numbers."""
        disk = cls()
        for folder, folders, files in os.walk(root):
            below = os.path.relpath(folder, root).removeprefix(".")
            table = disk.synced.setdefault(below, {})
            for name in folders:
                table[name] = ("directory", os.path.join(below, name))
            for name in files:
                path = Path(folder, name)
                if path.is_symlink():
                    table[name] = ("link", os.readlink(path))
                    continue
                number = -1 - len(disk.bytes_now)
                table[name] = ("file", number)
                disk.bytes_now[number] = disk.bytes_synced[number] = path.read_bytes()
        return disk

    def table_now(self, folder: str) -> dict[str, Entry]:
        """A directory as it is in memory."""
        return _after(self.synced.get(folder, {}), self.pending.get(folder, ()))

    def apply(self, change: Change) -> None:
        """Make a change."""
        folder, name = os.path.split(change.path)
        now = self.bytes_now
        match change.method:
            case "mkdir":
                self.synced.setdefault(change.path, {})
                self._step(folder, {name: ("directory", change.path)})
            case "create":
                now[change.file] = self.bytes_synced[change.file] = b""
                self._step(folder, {name: ("file", change.file)})
            case "symlink":
                self._step(folder, {name: ("link", change.data.decode())})
            case "remove":
                self._step(folder, {name: None})
            case "replace":
                old = os.path.basename(change.source)
                self._step(folder, {old: None, name: self.table_now(folder)[old]})
            case "reserve":
                now[change.file] = now[change.file].ljust(change.offset, b"\0")
            case "truncate":
                now[change.file] = now[change.file][: change.offset].ljust(change.offset, b"\0")
            case "write":
                data, end = now[change.file].ljust(change.offset, b"\0"), change.offset
                now[change.file] = data[:end] + change.data + data[end + len(change.data) :]
            case "sync":
                self.bytes_synced[change.file] = now[change.file]
            case "sync_directory":
                self.synced[change.path] = self.table_now(change.path)
                self.pending.pop(change.path, None)
            case _:
                raise AssertionError(f"{change.method} is not in the model")

    def _step(self, folder: str, step: Step) -> None:
        self.pending.setdefault(folder, []).append(step)

    def tables(self) -> Iterator[dict[str, dict[str, Entry]]]:
        """What the directories may hold after a loss of power."""
        steps = [(folder, step) for folder, steps in self.pending.items() for step in steps]
        everything = set(range(len(steps)))
        chosen = {frozenset[int](), frozenset(everything)}
        chosen |= {frozenset({number}) for number in everything}
        chosen |= {frozenset(everything - {number}) for number in everything}
        for kept in sorted(chosen, key=sorted):
            yield {
                folder: _after(
                    table,
                    [s for n, (where, s) in enumerate(steps) if n in kept and where == folder],
                )
                for folder, table in self.synced.items()
            }

    def content(self, number: int, unsynced: str) -> bytes:
        """What a file may hold after a loss of power."""
        synced, now = self.bytes_synced[number], self.bytes_now[number]
        if unsynced == "lost":
            return synced
        if unsynced == "kept":
            return now
        return synced[: len(now)].ljust(len(now), b"\0")


def _after(table: dict[str, Entry], steps: Sequence[Step]) -> dict[str, Entry]:
    found: dict[str, Entry | None] = dict(table)
    for step in steps:
        found.update(step)
    return {name: entry for name, entry in found.items() if entry is not None}


@dataclass(frozen=True)
class Image:
    """What lies on a disk once the power is back: ``(path, kind, content)`` of everything."""

    entries: frozenset[tuple[str, str, bytes]]

    def write(self, root: Path) -> None:
        """Make it real below ``root``."""
        for path, kind, content in sorted(self.entries):
            if kind == "directory":
                Path(root, path).mkdir(parents=True, exist_ok=True)
            elif kind == "link":
                os.symlink(content.decode(), root / path)
            else:
                Path(root, path).write_bytes(content)


def images(before: Disk, log: Log) -> Iterator[tuple[int, str, Image]]:
    """Every different image, with the number of changes before the power is lost, and how.

    Those after the last change come again: more has to hold once the save has returned.
    """
    seen: set[Image] = set()
    disk = before
    for number in range(len(log) + 1):
        if number:
            disk.apply(log[number - 1])
        if number == len(log):
            seen.clear()
        for tables in disk.tables():
            for unsynced in BYTES:
                image = Image(frozenset(_walk(disk, tables, "", unsynced)))
                if image not in seen:
                    seen.add(image)
                    yield number, unsynced, image


def _walk(
    disk: Disk, tables: dict[str, dict[str, Entry]], folder: str, unsynced: str
) -> Iterator[tuple[str, str, bytes]]:
    yield folder, "directory", b""
    for name, (kind, what) in tables.get(folder, {}).items():
        path = os.path.join(folder, name)
        if kind == "directory":
            yield from _walk(disk, tables, path, unsynced)
        elif kind == "link":
            yield path, "link", str(what).encode()
        else:
            yield path, "file", disk.content(int(what), unsynced)
