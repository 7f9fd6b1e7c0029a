"""What a Hugging Face model repository holds, written by all ranks together.

``model.safetensors``, or ``model-0000i-of-0000N.safetensors`` and an index, as ``save_pretrained``
of transformers leaves them. The single file, or else the index, is what makes them a model: it
comes last, in one atomic step. Shards of an export that is replaced keep their names until then,
so the new ones get names with the save's id in them where the names are taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Final

from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    RuleError,
    StorageError,
    UnsupportedLeafError,
    list_some,
)
from dcp_pipeline.core.fingerprint import Fingerprint
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.table import KeySpec
from dcp_pipeline.formats.safetensors import TensorEntry, encode_header, storage_dtype
from dcp_pipeline.layout.export import ExportLayout, PlannedFile, Publication, part_name
from dcp_pipeline.storage.base import Directory

__all__ = ["FINGERPRINTS", "INDEX", "SAVE_ID", "SINGLE", "HuggingFaceWriting", "check_holdable"]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SAVE_ID: Final = "dcp_pipeline.save_id"
FINGERPRINTS: Final = "dcp_pipeline.fingerprints"
"""In the metadata of a file: the save, and CRC-64/NVME of each tensor in order, hexadecimal."""

_ASSETS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What `save_pretrained` of transformers' configs, tokenizers and processors leaves."""

_SHARD: Final = re.compile(r"model-(?:[0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")


class HuggingFaceWriting(ExportLayout):
    """The half of layout ``huggingface`` that writes.

    Args:
        max_shard_bytes: a file holds no more, but for a single tensor that is larger.
        file_of: 1-based number of the file of each key; ``None`` to fill one file after another.
        tied: whether a tensor that shares another's memory is left out (``drop``; the metadata name
            it, as ``safetensors.torch.save_model`` does) or written again (``write``).
        assets: directory whose ``config.json``, ``generation_config.json`` and tokenizer are copied
            along.
    """

    shares_files: ClassVar[bool] = True
    keeps_notes: ClassVar[bool] = False
    record: ClassVar[str] = INDEX
    checksum = ""
    block_bytes = 0

    def __init__(
        self,
        max_shard_bytes: int = 5 * 10**9,
        file_of: Mapping[str, int] | None = None,
        tied: str = "drop",
        assets: str | None = None,
    ) -> None:
        self._max_shard_bytes = max_shard_bytes
        self._file_of = file_of
        self.writes_ties = tied == "write"
        self._assets = assets

    def data_name(self, rank: int, number: int, save_id: str, extension: str) -> str:
        raise CheckpointError("the files of a Hugging Face repository are of no rank")

    def watched(self, directory: Directory) -> dict[str, str | None]:
        return {name: directory.token(name) for name in (SINGLE, INDEX)}

    def may_be_left(self, name: str) -> bool:
        return _SHARD.fullmatch(name) is not None

    def needed(self, directory: Directory) -> Collection[str]:
        return {SINGLE, INDEX, *_shards_of(directory)}

    def committed_save(self, directory: Directory) -> str | None:
        return self.open(directory).save_id or None

    def plan_files(
        self,
        directory: Directory,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: bool,
    ) -> list[PlannedFile]:
        check_holdable(keys, specs)
        self.attachments()
        groups = self._groups(keys, specs)
        taken = _shards_of(directory)
        planned = []
        for number, group in enumerate(groups, start=1):
            final = SINGLE
            if len(groups) > 1:
                final = f"model-{number:05}-of-{len(groups):05}.safetensors"
                if final in taken:
                    final = final.replace("model-", f"model-{save_id[:8]}-", 1)
            header, starts = encode_header(*_content(group, keys, specs, save_id, fingerprint))
            size = starts[-1] + _nbytes(specs[group[-1]]) if group else len(header)
            planned.append(
                PlannedFile(part_name(final, save_id), final, size, tuple(group), tuple(starts))
            )
        return planned

    def _groups(self, keys: Sequence[str], specs: Sequence[KeySpec]) -> list[list[int]]:
        """Which keys lie in which file, in order."""
        stored = [number for number, spec in enumerate(specs) if spec.alias < 0]
        if self._file_of is not None:
            return self._given_groups(keys, stored)
        groups: list[list[int]] = [[]]
        filled = 0
        for number in stored:
            nbytes = _nbytes(specs[number])
            if groups[-1] and filled + nbytes > self._max_shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(number)
            filled += nbytes
        return groups

    def _given_groups(self, keys: Sequence[str], stored: Iterable[int]) -> list[list[int]]:
        assert self._file_of is not None
        found: dict[int, list[int]] = {}
        lacking = []
        for number in stored:
            file = self._file_of.get(keys[number])
            if file is None:
                lacking.append(f"no file is given for {keys[number]!r}")
            else:
                found.setdefault(file, []).append(number)
        unused = sorted(set(self._file_of) - set(keys))
        lacking += [f"a file is given for {key!r}, which the state lacks" for key in unused]
        count = max(found, default=1)
        lacking += [f"nothing lies in file {n}" for n in range(1, count + 1) if n not in found]
        if lacking and stored:
            raise RuleError.of(lacking, "fqn_to_index_mapping")
        return [found[number] for number in range(1, count + 1)]

    def attachments(self) -> list[tuple[str, bytes]]:
        if self._assets is None:
            return []
        folder = Path(self._assets).expanduser()
        try:
            names = sorted(path.name for path in folder.iterdir() if path.is_file())
            wanted = [name for name in names if any(fnmatch(name, glob) for glob in _ASSETS)]
            found = [(name, (folder / name).read_bytes()) for name in wanted]
        except OSError as error:
            raise StorageError(
                f"layout.assets cannot be read: {folder}: {error.strerror or error}",
                str(folder),
                error.errno,
            ) from error
        if not found:
            raise CheckpointNotFoundError(
                f"layout.assets names {folder}, where neither config.json nor a tokenizer lies",
                str(folder),
            )
        return found

    def header(
        self,
        file: PlannedFile,
        keys: Sequence[str],
        specs: Sequence[KeySpec],
        save_id: str,
        fingerprint: Fingerprint | None,
    ) -> bytes:
        entries, metadata = _content(file.keys, keys, specs, save_id, fingerprint is not None)
        if fingerprint is not None:
            words = [fingerprint.tensors[keys[number]] for number in file.keys]
            metadata[FINGERPRINTS] = "".join(words)
        return encode_header(entries, metadata)[0]

    def publication(
        self,
        directory: Directory,
        manifest: Manifest,
        files: Mapping[str, str],
        planned: Sequence[PlannedFile],
    ) -> Publication:
        # The model's own files come last: the very last of them may be the record.
        weights = [entry.name for entry in manifest.files]
        renamed = [(files[final], final) for final in sorted(files, key=weights.__contains__)]
        old = _shards_of(directory)
        if len(weights) == 1:
            # One file, and no index: it is the record itself.
            gone = [*sorted(old), INDEX]
            return Publication(renamed, None, [name for name in gone if directory.exists(name)])
        names = manifest.names
        weight_map = {names[key]: file.final for file in planned for key in file.keys}
        index = {
            "metadata": {"total_size": int(manifest.table.nbytes.sum()), SAVE_ID: manifest.save_id},
            "weight_map": weight_map,
        }
        # A single file would be taken for the model as long as it is there.
        gone = [SINGLE, *sorted(old - set(weights))]
        return Publication(
            renamed,
            (INDEX, (json.dumps(index, indent=2) + "\n").encode()),
            [name for name in gone if directory.exists(name)],
        )


def _nbytes(spec: KeySpec) -> int:
    return prod(spec.shape) * spec.item_size


def check_holdable(keys: Sequence[str], specs: Sequence[KeySpec]) -> None:
    """Raise unless all keys are tensors of dtypes that safetensors has a name for.

    Raises:
        UnsupportedLeafError: naming those that are not.
    """
    refused = []
    for key, spec in zip(keys, specs, strict=True):
        if spec.dtype is None:
            refused.append(f"{key!r} is no tensor")
            continue
        try:
            _, trailing = storage_dtype(spec.dtype)
            if trailing:
                refused.append(f"{key!r} is of {spec.dtype}, which safetensors has no name for")
        except UnsupportedLeafError as error:
            refused.append(f"{key!r}: {error}")
    if refused:
        raise UnsupportedLeafError(
            f"a Hugging Face repository cannot hold {len(refused)} keys: {list_some(refused)};"
            " leave them out with a rule (transforms: [{kind: exclude, keys: [...]}])"
        )


def _content(
    group: Sequence[int],
    keys: Sequence[str],
    specs: Sequence[KeySpec],
    save_id: str,
    fingerprint: bool,
) -> tuple[list[TensorEntry], dict[str, str]]:
    """The entries and metadata of a file; the words of the fingerprints are still zeros."""
    entries = []
    for number in group:
        spec = specs[number]
        assert spec.dtype is not None
        entries.append(TensorEntry(keys[number], spec.dtype, spec.shape, _nbytes(spec)))
    metadata = {"format": "pt", SAVE_ID: save_id}
    if fingerprint:
        metadata[FINGERPRINTS] = "0" * 16 * len(group)
    inside = set(group)
    for key, spec in zip(keys, specs, strict=True):
        if spec.alias in inside and key not in metadata:
            metadata[key] = keys[spec.alias]
    return entries, metadata


def _shards_of(directory: Directory) -> set[str]:
    """The shards that the index of a replaced export names."""
    if not directory.exists(INDEX):
        return set()
    try:
        found: Any = json.loads(directory.read(INDEX))["weight_map"].values()
        return {name for name in found if isinstance(name, str) and _SHARD.fullmatch(name)}
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        # What cannot be read names nothing that may be removed.
        return set()
