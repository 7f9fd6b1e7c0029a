"""What the files of a foreign checkpoint hold, gathered into a manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import numpy as np

from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import CorruptCheckpointError, FormatError, UnsafeCheckpointError
from dcp_pipeline.core.hashing import EqualHashes
from dcp_pipeline.core.manifest import FileEntry, Manifest, check_places, safe_relative_name
from dcp_pipeline.core.path import Path, assign_names, check_paths, dotted
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.formats.torch_tree import Empty, TorchTree, Unread, parse_tree_zip
from dcp_pipeline.formats.torch_values import write_value
from dcp_pipeline.formats.torch_zip import StoredTensor
from dcp_pipeline.storage.base import Directory, file_reader
from dcp_pipeline.types.dtypes import dtype_name

__all__ = ["Building", "Chunk", "boxes_of_run", "chunk_of", "naming", "opened_tree"]

_MOST_INLINE: Final = 64 << 20
_LIMIT: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, or the whole of it, in a file.

    Attributes:
        file: number of the file.
        begin, length: where its bytes lie.
        offsets, sizes: its place in the whole tensor.
        payload: where its elements start from ``begin``; -1 where the item is a zip to look into.
        strides: in elements, where they are not in row-major order.
    """

    file: int
    begin: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    payload: int = 0
    strides: tuple[int, ...] | None = None


class Building:
    """Gathers files, tensors and values; :meth:`manifest` is what they come to.

    Args:
        directory: that all files lie in.
        kind: of checkpoint, which becomes the manifest's layout.
    """

    def __init__(self, directory: Directory, kind: str) -> None:
        self.directory, self.kind = directory, kind
        self._files: list[FileEntry] = []
        self._numbers: dict[str, int] = {}
        self._specs: list[KeySpec] = []
        self._rows: list[tuple[int, Chunk]] = []
        self._inline: dict[int, bytes] = {}
        self._inline_bytes = 0
        self._empty: list[tuple[Path, str]] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self.unread: dict[str, str] = {}

    def file(self, name: str, size: int | None = None) -> int:
        """The number of a file.

        Args:
            size: its bytes, where they are known.

        Raises:
            UnsafeCheckpointError: the name leads out of the directory.
            MissingFileError: it is not there.
        """
        if name not in self._numbers:
            safe_relative_name(name)
            if size is None:
                with self.directory.open(name) as source:
                    size = source.size
            self._numbers[name] = len(self._files)
            self._files.append(FileEntry(name, size))
        return self._numbers[name]

    def size(self, file: int) -> int:
        """Bytes of a file."""
        return self._files[file].size

    def tensor(self, path: Path, dtype: str, shape: Sequence[int], chunks: Sequence[Chunk]) -> None:
        """Add a tensor by the chunks that tile it."""
        key = self._add(KeySpec(path, Kind.TENSOR, dtype, tuple(shape)))
        self._rows += [(key, chunk) for chunk in chunks if 0 not in chunk.sizes]

    def stored(self, path: Path, tensor: StoredTensor, file: int) -> None:
        """Add a tensor of a file of ``torch.save``; a second name of one shares its storage."""
        dtype = _dtype_of(path, tensor)
        place = (
            file, tensor.payload_offset, tensor.storage_offset, tensor.sizes, tensor.strides, dtype
        )  # fmt: skip
        alias = self._known.get(place, -1)
        if alias >= 0:
            self._add(KeySpec(path, Kind.TENSOR, dtype, tensor.sizes, alias))
            return
        self._known[place] = len(self._specs)
        self.tensor(path, dtype, tensor.sizes, [chunk_of(tensor, dtype, file)])

    def same(self, path: Path, other: Path) -> None:
        """Add a second name of a tensor that was added."""
        for key, spec in enumerate(self._specs):
            if spec.path == other and spec.dtype is not None:
                self._add(replace(spec, path=path, alias=spec.alias if spec.alias >= 0 else key))
                return
        raise FormatError(f"{dotted(path)!r} is said to be {dotted(other)!r}, which is not there")

    def value(self, path: Path, value: Any) -> None:
        """Add a Python value, which the manifest keeps.

        Raises:
            UnsafeCheckpointError: all values together are too many for a manifest.
        """
        data = write_value(value)
        self._inline_bytes += len(data)
        if self._inline_bytes > _MOST_INLINE:
            raise UnsafeCheckpointError(
                f"{self.directory.location} holds Python values of more than {_MOST_INLINE} bytes"
            )
        self._inline[self._add(KeySpec(path, Kind.VALUE))] = data

    def stored_value(self, path: Path, file: int, begin: int, length: int) -> None:
        """Add a Python value that is an item of ``torch.save`` in a file."""
        key = self._add(KeySpec(path, Kind.VALUE))
        self._rows.append((key, Chunk(file, begin, length, (), ())))

    def empty(self, path: Path, kind: str) -> None:
        """Add a container that holds nothing."""
        self._empty.append((path, kind))

    def leaves(self, tree: TorchTree, part: Any, file: int, prefix: Path) -> None:
        """Add everything in a part of a file of ``torch.save``."""
        for path, leaf in tree.leaves(part, prefix):
            path = path or ("value",)
            if isinstance(leaf, StoredTensor):
                self.stored(path, leaf, file)
            elif isinstance(leaf, Unread):
                self.unread[dotted(path)] = leaf.name
            elif isinstance(leaf, Empty):
                self.empty(path, leaf.kind)
            else:
                self.value(path, leaf)

    def take(self, part: Manifest, prefix: Path = (), folder: str = "", skip: int = 0) -> None:
        """Add everything in the manifest of a folder.

        Args:
            prefix: put before each path, instead of its first ``skip`` components.
            folder: that its files lie in.
        """
        if not part.is_foreign:
            raise FormatError(
                f"{folder or 'it'} holds a checkpoint of this package, expected one of plain DCP"
            )
        first = len(self._specs)
        place = f"{folder}/" if folder else ""
        files = [self.file(place + entry.name, entry.size) for entry in part.files]
        for spec in part.table.keys:
            alias = spec.alias + first if spec.alias >= 0 else -1
            self._add(replace(spec, path=(*prefix, *spec.path[skip:]), alias=alias))
        self._empty += [((*prefix, *path[skip:]), kind) for path, kind in part.empty]
        table = part.table
        places = zip(
            table.key.tolist(), table.file.tolist(), table.offset.tolist(), table.length.tolist(),
            table.payload.tolist(), strict=True,
        )  # fmt: skip
        for row, (key, file, begin, length, payload) in enumerate(places):
            chunk = Chunk(files[file], begin, length, *table.boxes(row), payload)
            self._rows.append((first + key, chunk))

    def _add(self, spec: KeySpec) -> int:
        self._specs.append(spec)
        return len(self._specs) - 1

    def manifest(self) -> Manifest:
        """Everything that was added.

        Raises:
            CorruptCheckpointError: keys, places or chunks contradict one another.
            UnsafeCheckpointError: absurd paths.
        """
        specs = self._specs
        check_paths([spec.path for spec in specs])
        EqualHashes().add(path for path, _ in self._empty)
        for spec in specs:
            if prod(extent or 1 for extent in spec.shape) * spec.item_size >= _LIMIT:
                raise FormatError(f"{dotted(spec.path)!r} has the absurd shape {spec.shape}")
        rows = sorted(self._rows, key=lambda row: (row[0], row[1].offsets))
        chunks = [chunk for _, chunk in rows]
        places = [(one.file, one.begin, one.length, one.payload) for one in chunks]
        extents = [(*one.offsets, *one.sizes) for one in chunks]
        if any(not -1 <= number < _LIMIT for row in (*places, *extents) for number in row):
            raise FormatError("a chunk has an absurd or negative place")
        table = ChunkTable.build(
            specs, [key for key, _ in rows], [one.offsets for one in chunks],
            [one.sizes for one in chunks],
        )  # fmt: skip
        file, offset, length, payload = np.asarray(places, np.int64).reshape(-1, 4).T
        names = assign_names([spec.path for spec in specs])
        manifest = Manifest(
            save_id="",
            created=0.0,
            world_size=0,
            serialization="torch_save",
            layout=self.kind,
            names=tuple(names),
            table=replace(table, file=file, offset=offset, length=length, payload=payload),
            files=tuple(self._files),
            empty=tuple(dict(self._empty).items()),
            inline=self._inline,
            strided={row: one.strides for row, one in enumerate(chunks) if one.strides is not None},
        )
        self._check(manifest)
        return manifest

    def _check(self, manifest: Manifest) -> None:
        check_places(manifest)
        skip = np.asarray([spec.alias >= 0 for spec in self._specs], bool)
        skip[list(self._inline)] = True
        problems = tiling_problems(manifest.table, skip)
        if problems:
            raise CorruptCheckpointError(
                f"the files in {self.directory.location} do not hold whole tensors:"
                f" {'; '.join(problems)}"
            )


def _dtype_of(path: Path, tensor: StoredTensor) -> str:
    dtype = dtype_name(tensor.dtype)
    if dtype is None:
        raise FormatError(f"{dotted(path)!r} has dtype {tensor.dtype}, which is not read")
    return dtype


def chunk_of(tensor: StoredTensor, dtype: str, file: int) -> Chunk:
    """A tensor of a file of ``torch.save`` as one chunk."""
    width, sizes = ITEM_SIZES[dtype], tensor.sizes
    begin = tensor.payload_offset + tensor.storage_offset * width
    zeros = (0,) * len(sizes)
    if tensor.is_row_major:
        return Chunk(file, begin, prod(sizes) * width, zeros, sizes)
    last = sum((n - 1) * step for n, step in zip(sizes, tensor.strides, strict=True))
    return Chunk(file, begin, (last + 1) * width, zeros, sizes, 0, tensor.strides)


def boxes_of_run(
    shape: Sequence[int], first: int, last: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """The row-major elements ``first`` to ``last`` of a tensor as boxes.

    Each is in one stretch: what goes before the first whole row, the whole rows, what is left.

    Yields:
        Offsets and sizes of a box, and the number of its first element.

    >>> list(boxes_of_run([4, 3], 2, 10))
    [((0, 2), (1, 1), 2), ((1, 0), (2, 3), 3), ((3, 0), (1, 1), 9)]
    """
    if first >= last:
        return
    if not shape:
        yield (), (), first
        return
    inner = prod(shape[1:])
    start, stop = -(-first // inner), last // inner
    if start > stop:
        yield from _within(stop, shape[1:], first, last, inner)
        return
    if first < start * inner:
        yield from _within(start - 1, shape[1:], first, start * inner, inner)
    if start < stop:
        yield (start, *(0 for _ in shape[1:])), (stop - start, *shape[1:]), start * inner
    if stop * inner < last:
        yield from _within(stop, shape[1:], stop * inner, last, inner)


def _within(
    row: int, shape: Sequence[int], first: int, last: int, inner: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    for offsets, sizes, at in boxes_of_run(shape, first - row * inner, last - row * inner):
        yield (row, *offsets), (1, *sizes), at + row * inner


@contextlib.contextmanager
def opened_tree(directory: Directory, name: str, unread: Sequence[str] = ()) -> Iterator[TorchTree]:
    """Look into a file of ``torch.save`` in a directory, which stays open meanwhile.

    Raises:
        MissingFileError: it is not there.
        FormatError, UnsafeCheckpointError: as :func:`parse_tree_zip`, the file named.
    """
    with directory.open(name) as source, naming(name):
        yield parse_tree_zip(file_reader(source), source.size, unread)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the file's name before what is wrong with it."""
    try:
        yield
    except (FormatError, UnsafeCheckpointError) as error:
        if type(error) not in (FormatError, UnsafeCheckpointError):
            raise
        raise type(error)(f"{name}: {error.message}") from error
