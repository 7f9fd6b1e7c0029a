"""A folder of ``shard-*-model-*-of-*.safetensors``, each of one rank, as DCP's writer leaves it.

Nothing in such a folder says which files belong together: a reader takes all that are there. So
they never replace others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final, NoReturn

from dcp_pipeline.core.errors import CheckpointError, CheckpointExistsError
from dcp_pipeline.core.fingerprint import Fingerprint
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.layout.export import ExportLayout, PlannedFile, Publication, part_name
from dcp_pipeline.layout.huggingface_reading import manifest_of, read_repository
from dcp_pipeline.storage.base import Directory

__all__ = ["HuggingFaceShards"]

_PART: Final = re.compile(r"\.shard-(\d+)-\d+\..*\.part")


class HuggingFaceShards(ExportLayout):
    """Each rank writes files of its own, boxes of tensors under their keys.

    Args:
        file_of: 1-based number of the file of each key; ``None`` for one file a rank.
    """

    kind: ClassVar[str] = "huggingface"
    shares_files: ClassVar[bool] = False
    record: ClassVar[str] = ""
    checksum = ""
    block_bytes = 0

    def __init__(self, file_of: Mapping[str, int] | None = None) -> None:
        self._file_of = file_of

    def number_of(self, key: str) -> int:
        """The number of the file of a key, among those of a rank."""
        return 1 if self._file_of is None else self._file_of[key]

    def open(self, directory: Directory) -> Manifest:
        return manifest_of(read_repository(directory), directory.location)

    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        return part_name(f"shard-{rank + 1}-{number}{extension}", save_id)

    def watched(self, directory: Directory) -> dict[str, str | None]:
        """None: see :meth:`current`.

        Raises:
            CheckpointExistsError: there are files that a reader would take with ours.
        """
        there = [name for name in directory.names() if name.endswith(".safetensors")]
        if there:
            raise CheckpointExistsError(
                f"{directory.location} holds {there[0]}, which every reader would take for a part"
                " of the new checkpoint: sharded files have no index that could name the right"
                " ones. Save elsewhere, or remove it",
                directory.location,
            )
        return {}

    def committed_save(self, directory: Directory) -> str | None:
        return None

    def named(self, directory: Directory, manifest: Manifest) -> tuple[Manifest, dict[str, str]]:
        count = 1 if self._file_of is None else max(self._file_of.values())
        first_key: dict[int, str] = {}
        for file, key in zip(
            manifest.table.file.tolist(), manifest.table.key.tolist(), strict=True
        ):
            first_key.setdefault(file, manifest.names[key])
        finals = []
        for position, entry in enumerate(manifest.files):
            match = _PART.fullmatch(entry.name)
            assert match is not None
            number = self.number_of(first_key[position])
            finals.append(f"shard-{int(match[1]):05}-model-{number:05}-of-{count:05}.safetensors")
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
        return Publication([(part, final) for final, part in files.items()], None, [])

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
    raise CheckpointError("each sharded file is of the rank that writes it")
