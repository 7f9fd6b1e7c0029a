"""The half of layout ``mega`` that writes: ranks write shards of their own, one commit names them.

One file is ``model.mega``, and is itself what makes it a checkpoint: what is known of the whole
state goes into its footer, and the last rename publishes it. Several have an index, which comes
last. Shards that are replaced keep their names until then, so the new ones get names with the
save's id where the names are taken.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, ClassVar, NoReturn

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.fingerprint import Fingerprint, encode_fingerprint
from dcp_pipeline.core.manifest import Manifest, encode_key
from dcp_pipeline.core.path import encode_path
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.formats.mega import parse_mega
from dcp_pipeline.formats.mega_encode import encode_footer
from dcp_pipeline.formats.mega_keys import STATE_KEY
from dcp_pipeline.formats.mega_values import encode_value
from dcp_pipeline.layout.export import ExportLayout, PlannedFile, Publication, part_name
from dcp_pipeline.layout.mega_index import encode_index, parse_index
from dcp_pipeline.layout.mega_names import INDEX, SINGLE, is_shard, shard_name
from dcp_pipeline.storage.base import Directory, file_reader

__all__ = ["MegaWriting"]


class MegaWriting(ExportLayout):
    """Each rank writes whole files of its own.

    Args:
        tied: whether a tensor that shares another's memory is left out, which readers other than
            this package then lack (``drop``), or written again (``write``).
    """

    shares_files: ClassVar[bool] = False
    record: ClassVar[str] = INDEX
    checksum = ""
    block_bytes = 0

    def __init__(self, tied: str = "drop") -> None:
        self.writes_ties = tied == "write"

    @property
    def records(self) -> tuple[str, ...]:
        return (SINGLE, INDEX)

    def may_be_left(self, name: str) -> bool:
        return is_shard(name)

    def needed(self, directory: Directory) -> Collection[str]:
        return {SINGLE, INDEX, *_shards_of(directory)}

    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        return part_name(f"model-{rank}-{number}{extension}", save_id)

    def watched(self, directory: Directory) -> dict[str, str | None]:
        return {name: directory.token(name) for name in (SINGLE, INDEX)}

    def named(self, directory: Directory, manifest: Manifest) -> tuple[Manifest, dict[str, str]]:
        taken, count = _shards_of(directory), len(manifest.files)
        finals = [shard_name(number, count) for number in range(count)]
        if not taken.isdisjoint(finals):
            stem = f"model-{manifest.save_id[:8]}"
            finals = [shard_name(number, count, stem) for number in range(count)]
        files = tuple(
            replace(entry, name=final) for entry, final in zip(manifest.files, finals, strict=True)
        )
        parts = dict(zip(finals, (entry.name for entry in manifest.files), strict=True))
        return replace(manifest, files=files), parts

    def publication(
        self,
        directory: Directory,
        manifest: Manifest,
        files: Mapping[str, str],
        planned: Sequence[PlannedFile],
    ) -> Publication:
        renamed = [(part, final) for final, part in files.items()]
        old = _shards_of(directory)
        if list(files) == [SINGLE]:
            _add_footer(directory, files[SINGLE], manifest)
            gone = [INDEX, *sorted(old)]
            return Publication(renamed, None, [name for name in gone if directory.exists(name)])
        weight_map: dict[str, str] = {}
        for final, part in files.items():
            with directory.open(part) as source:
                found = parse_mega(file_reader(source), source.size)
            weight_map |= {tensor.name: final for tensor in found.tensors}
        metadata = {"total_size": _tensor_bytes(manifest), STATE_KEY: _state(manifest)}
        # A single file would be taken for the model as long as it is there.
        gone = [SINGLE, *sorted(old - set(files))]
        return Publication(
            renamed,
            (INDEX, encode_index(weight_map, list(files), metadata)),
            [name for name in gone if directory.exists(name)],
        )

    def plan_files(
        self,
        directory: Directory,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: bool,
    ) -> list[PlannedFile]:
        _of_its_rank()

    def header(
        self,
        file: PlannedFile,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: Fingerprint | None,
    ) -> bytes:
        _of_its_rank()


def _of_its_rank() -> NoReturn:
    raise CheckpointError("each file of a MEGA repository is of the rank that writes it")


def _tensor_bytes(manifest: Manifest) -> int:
    specs = manifest.table.keys
    return sum(spec.item_size * prod(spec.shape) for spec in specs if spec.dtype and spec.alias < 0)


def _state(manifest: Manifest) -> dict[str, Any]:
    """What no file says by itself: see ``layout.mega_reading``."""
    prints = manifest.fingerprint
    return {
        "save_id": manifest.save_id,
        "created": manifest.created,
        "world_size": manifest.world_size,
        "versions": dict(manifest.versions),
        "keys": [encode_key(*row) for row in zip(manifest.names, manifest.table.keys, strict=True)],
        "empty": [[encode_path(path), kind] for path, kind in manifest.empty],
        "notes": dict(manifest.notes),
        "fingerprint": None if prints is None else encode_fingerprint(prints, manifest.names),
    }


def _add_footer(directory: Directory, name: str, manifest: Manifest) -> None:
    state = encode_value(json.dumps(_state(manifest), separators=(",", ":")))
    assert state is not None
    size = directory.size(name)
    footer = encode_footer({STATE_KEY: state}, size)
    with directory.open_ranges(name, size + len(footer)) as writer:
        writer.write(size, memoryview(footer))
    directory.sync()


def _shards_of(directory: Directory) -> set[str]:
    """The shards that the index of a replaced checkpoint names."""
    if not directory.exists(INDEX):
        return set()
    try:
        return set(filter(is_shard, parse_index(directory.read(INDEX), INDEX).files))
    except CheckpointError:
        # What cannot be read names nothing that may be removed.
        return set()
