"""One file that ``torch.load`` opens, as a conversion writes it; the coordinator alone does.

It is no layout of a config: a save of a job is not gathered in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NoReturn

from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.fingerprint import Fingerprint
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.layout.export import ExportLayout, PlannedFile, Publication
from dcp_pipeline.layout.foreign.torch_save import open_torch_save
from dcp_pipeline.storage.base import Directory

__all__ = ["TorchFileLayout"]


class TorchFileLayout(ExportLayout):
    """A file of a directory, in which other files may lie.

    Args:
        name: of the file.
    """

    kind: ClassVar[str] = "torch_save"
    shares_files: ClassVar[bool] = True
    record: ClassVar[str] = ""
    checksum = ""
    block_bytes = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, directory: Directory) -> Manifest:
        return open_torch_save(directory, self.name)

    def watched(self, directory: Directory) -> dict[str, str | None]:
        return {self.name: directory.token(self.name)}

    def committed_save(self, directory: Directory) -> str | None:
        return None

    def publication(
        self,
        directory: Directory,
        manifest: Manifest,
        files: Mapping[str, str],
        planned: Sequence[PlannedFile],
    ) -> Publication:
        return Publication([(files[self.name], self.name)], None, [])

    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        _not_of_a_save()

    def plan_files(
        self,
        directory: Directory,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: bool,
    ) -> list[PlannedFile]:
        _not_of_a_save()

    def header(
        self,
        file: PlannedFile,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: Fingerprint | None,
    ) -> bytes:
        _not_of_a_save()


def _not_of_a_save() -> NoReturn:
    raise CheckpointError("the file of a conversion is written whole, by one rank")
