"""Which files of a Hugging Face repository make the model, and what its index says of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_pipeline.core.errors import (
    CheckpointNotFoundError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    UnsafeCheckpointError,
)
from dcp_pipeline.core.manifest import safe_relative_name
from dcp_pipeline.formats.bounded_json import parse_object
from dcp_pipeline.layout.export import is_export_part
from dcp_pipeline.storage.base import Directory

__all__ = ["ModelFiles", "block_size", "find_files", "read_json"]

_MOST_BYTES = 256 << 20
_MOST_CONFIG_BYTES = 16 << 20
_MODEL = "model.safetensors"
_SHARDED = "sharded"
_BIN = ("pytorch_model.bin", "adapter_model.bin")
_BIN_INDEX = "pytorch_model.bin.index.json"
_INDEX_SUFFIX = ".safetensors.index.json"
_PART = re.compile(r"(?!shard-)(.+)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        names: of the files, in order.
        index: the file that lists them, if any.
        weight_map: key to file, of the index.
        total_size: bytes of all tensors as the index says it, if it does.
    """

    names: Sequence[str]
    index: str | None = None
    weight_map: Mapping[str, str] | None = None
    total_size: int | float | None = None


def read_json(directory: Directory, name: str, most_bytes: int) -> dict[str, object]:
    """A JSON object of the repository; see :func:`parse_object` for what is refused."""
    size = directory.size(name)
    if size > most_bytes:
        raise UnsafeCheckpointError(f"{name} has {size} bytes, at most {most_bytes} are read")
    return parse_object(directory.read(name, 0, most_bytes), name, most_bytes=most_bytes)


def find_files(directory: Directory) -> ModelFiles:
    """The files of the model, safetensors before ``.bin``, whole ones before shards.

    Raises:
        CheckpointNotFoundError: there are none.
        FormatError, UnsafeCheckpointError: the index is damaged, or names files elsewhere.
        MissingFileError: some of a numbered row of files are not there.
    """
    found = directory.names()
    if _MODEL in found:
        return ModelFiles([_MODEL])
    indices = [name for name in found if name.endswith(_INDEX_SUFFIX)]
    if f"{_MODEL}.index.json" in indices:
        indices = [f"{_MODEL}.index.json"]
    if len(indices) > 1:
        raise FormatError(f"{directory.location} holds several models: {', '.join(indices[:5])}")
    if indices:
        return _indexed(directory, indices[0])
    flat = [name for name in found if name.endswith(".safetensors")]
    if not flat and _SHARDED in found:
        flat = [n for n in directory.names_below(_SHARDED) if n.endswith(".safetensors")]
    if flat:
        if any(map(is_export_part, found)):
            raise _incomplete(directory)
        _check_numbers(directory, flat)
        return ModelFiles(flat)
    whole = [name for name in _BIN if name in found]
    if whole:
        return ModelFiles(whole[:1])
    if _BIN_INDEX in found:
        return _indexed(directory, _BIN_INDEX)
    if any(map(is_export_part, found)):
        raise _incomplete(directory)
    what = "no model in it (no *.safetensors, no pytorch_model.bin)" if found else "nothing there"
    raise CheckpointNotFoundError(f"{directory.location}: {what}", directory.location)


def _incomplete(directory: Directory) -> IncompleteCheckpointError:
    return IncompleteCheckpointError(
        f"the model in {directory.location} is incomplete: an export into it was begun, and never"
        " committed",
        directory.location,
    )


def _check_numbers(directory: Directory, names: Sequence[str]) -> None:
    """Of files that say their number and how many there are, none may be lacking."""
    rows: dict[tuple[str, int], set[int]] = {}
    for name in names:
        match = _PART.fullmatch(name)
        if match:
            rows.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in rows.items():
        if len(numbers) != count or numbers != set(range(1, count + 1)):
            raise MissingFileError(
                f"{directory.location} holds {len(numbers)} of the {count} files"
                f" {stem}-#####-of-{count:05}.safetensors",
                directory.location,
            )


def _indexed(directory: Directory, index: str) -> ModelFiles:
    members = read_json(directory, index, _MOST_BYTES)
    weight_map, metadata = members.get("weight_map"), members.get("metadata") or {}
    if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
        raise FormatError(f"{index} has no weight_map that says where each tensor lies")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise FormatError(f"{index} places {key[:200]!r} in a {type(name).__name__}")
    names = sorted(set(weight_map.values()))
    for name in names:
        safe_relative_name(name)
    total_size = metadata.get("total_size")
    if isinstance(total_size, bool) or not isinstance(total_size, int | float):
        total_size = None
    return ModelFiles(names, index, weight_map, total_size)


def block_size(directory: Directory) -> tuple[int, int]:
    """Rows and columns of the blocks that share a scale, as ``config.json`` says it, or 128 each.

    Raises:
        FormatError: ``config.json`` is damaged, or says something else than two numbers.
    """
    default = (128, 128)
    if not directory.exists("config.json"):
        return default
    config = read_json(directory, "config.json", _MOST_CONFIG_BYTES)
    for part in (config, config.get("text_config")):
        settings = part.get("quantization_config") if isinstance(part, dict) else None
        found = settings.get("weight_block_size") if isinstance(settings, dict) else None
        if found is None:
            continue
        if not isinstance(found, list) or [type(n) for n in found] != [int, int]:
            raise FormatError(f"config.json has the weight_block_size {str(found)[:80]}")
        rows, columns = found
        if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
            raise FormatError(f"config.json has the weight_block_size {str(found)[:80]}")
        return rows, columns
    return default
