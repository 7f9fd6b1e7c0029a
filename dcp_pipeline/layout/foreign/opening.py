"""Opens whatever a converter reads: ours, plain DCP's, and what other trainers have written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from dcp_pipeline.core.errors import CheckpointNotFoundError, ConfigError, FormatError
from dcp_pipeline.core.garbage import collector_paused
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.registry import model_of
from dcp_pipeline.layout.foreign.dcp_inside import open_accelerate, open_megatron_dist
from dcp_pipeline.layout.foreign.deepspeed import OPTIM_STATES, open_deepspeed
from dcp_pipeline.layout.foreign.deepspeed_universal import (
    LATEST_UNIVERSAL,
    open_deepspeed_universal,
)
from dcp_pipeline.layout.foreign.megatron import LATEST, iteration_folder, open_megatron
from dcp_pipeline.layout.foreign.places import Place, place_of
from dcp_pipeline.layout.foreign.recognizing import (
    DCP_RECORDS,
    STEP_FOLDER,
    TORCH_FILE,
    recognized,
)
from dcp_pipeline.layout.foreign.torch_save import open_torch_save
from dcp_pipeline.layout.foreign.torchsnapshot import open_torchsnapshot
from dcp_pipeline.layout.huggingface_index import ModelFiles
from dcp_pipeline.layout.huggingface_reading import manifest_of, read_repository
from dcp_pipeline.layout.mega_reading import mega_manifest
from dcp_pipeline.storage.base import Directory, Storage
from dcp_pipeline.storage.filesystem import FileSystemStorage

__all__ = ["KINDS", "open_source", "recognize"]

Opened = tuple[Directory, Manifest]


def recognize(path: str, storage: Storage | None = None) -> str:
    """The kind of checkpoint that lies at a path, one of :data:`KINDS`; no file is read.

    Raises:
        CheckpointNotFoundError: nothing that is known; the message lists what was looked for.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, f"{folder}/model.pt")
        ...     recognize(f"{folder}/model.pt")
        'torch_save'
    """
    return recognized(place_of(path, storage or FileSystemStorage()))


def open_source(
    path: str,
    kind: str | None = None,
    options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> Opened:
    """A checkpoint of any kind: the directory that its files lie in, and what they hold.

    Args:
        path: of a folder, of the folder of a whole run (the newest checkpoint that its record
            names), or of a single file.
        kind: one of :data:`KINDS`; ``None`` to recognise it.
        options: of the layouts ``dcp``, ``huggingface`` and ``mega``.
        storage: that the path is in; ``None`` for the file system.

    Raises:
        CheckpointNotFoundError: there is none of that kind.
        CorruptCheckpointError, UnsafeCheckpointError: it is damaged, or not to be trusted.
        ConfigError: the kind is not known, or does not take these options.
    """
    place = place_of(path, storage or FileSystemStorage())
    kind = recognized(place) if kind is None else kind
    if kind not in KINDS:
        raise ConfigError(f"no kind of checkpoint is called {kind!r}: {', '.join(KINDS)}", "kind")
    if options and kind not in _LAYOUTS:
        raise ConfigError(f"checkpoints of kind {kind!r} have no options", "options")
    if options and place.file is not None:
        raise ConfigError(
            f"a single file has no options; name the folder of {place.file}", "options"
        )
    if kind in _LAYOUTS and place.file is None:
        return _by_layout(place, kind, options or {})
    with collector_paused():
        return _OPENERS[kind](place)


def _by_layout(place: Place, kind: str, options: Mapping[str, Any]) -> Opened:
    try:
        layout = model_of("layout", kind)(kind=kind, **options).build()
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, one['loc']))}={one['input']!r}: {one['msg']}"
            for one in error.errors()
        )
        raise ConfigError(f"checkpoints of kind {kind!r} do not take {wrong}", "options") from None
    directory = place.storage.open(place.location, follow_links=layout.follows_links)
    return directory, layout.open(directory)


def _file_of(place: Place, of: str) -> tuple[Directory, str]:
    """A single file; it may be a link, for it was named itself."""
    name = place.file
    if name is None:
        found = place.matching(TORCH_FILE)
        if len(found) != 1:
            raise CheckpointNotFoundError(
                f"{place.location} has {len(found)} files of {of}; name the one that you mean",
                place.location,
            )
        (name,) = found
    return place.storage.open(place.location, follow_links=True), name


def _torch_save(place: Place) -> Opened:
    directory, name = _file_of(place, "torch.save")
    return directory, open_torch_save(directory, name)


def _safetensors(place: Place) -> Opened:
    directory, name = _file_of(place, "safetensors")
    found = read_repository(directory, ModelFiles([name]))
    return directory, manifest_of(found, directory.location)


def _mega(place: Place) -> Opened:
    directory, name = _file_of(place, "MEGA")
    return directory, mega_manifest(directory, only=name)


def _torchtitan(place: Place) -> Opened:
    steps = place.matching(STEP_FOLDER, among_folders=True)
    if not steps:
        return _by_layout(place, "dcp", {})
    for folder in sorted(steps, key=lambda name: -int(name.removeprefix("step-"))):
        below = place.below(folder)
        if below.has(*DCP_RECORDS):
            return _by_layout(below, "dcp", {})
    raise CheckpointNotFoundError(
        f"{place.location} has {len(steps)} folders step-{{N}}, none with a committed checkpoint",
        place.location,
    )


def _accelerate(place: Place) -> Opened:
    directory = place.directory
    return directory, open_accelerate(
        directory, place.folders, lambda folder: place.below(folder).directory
    )


def _megatron(place: Place) -> Opened:
    if place.has(LATEST):
        place = place.below(iteration_folder(place.directory.read(LATEST, 0, 64)))
        if place.has("metadata.json"):
            return _megatron_dist(place)
    return place.directory, open_megatron(place.directory, place.folders)


def _megatron_dist(place: Place) -> Opened:
    if place.has(LATEST):
        place = place.below(iteration_folder(place.directory.read(LATEST, 0, 64)))
    return place.directory, open_megatron_dist(place.directory)


def _deepspeed_universal(place: Place) -> Opened:
    if place.has(LATEST_UNIVERSAL):
        place = place.below(place.pointer(LATEST_UNIVERSAL))
    parameters = place.below("zero").folders
    return place.directory, open_deepspeed_universal(place.directory, parameters)


def _deepspeed(place: Place) -> Opened:
    if not place.matching(OPTIM_STATES) and place.has("latest"):
        place = place.below(place.pointer("latest"))
    return place.directory, open_deepspeed(place.directory)


def _torchsnapshot(place: Place) -> Opened:
    return place.directory, open_torchsnapshot(place.directory)


def _no_file(place: Place) -> Opened:
    raise FormatError(f"{place.location}/{place.file} is a file; a checkpoint of DCP is a folder")


_LAYOUTS: Final = ("dcp", "huggingface", "mega")
_OPENERS: Final[Mapping[str, Callable[[Place], Opened]]] = {
    "dcp": _no_file,
    "huggingface": _safetensors,
    "mega": _mega,
    "torch_save": _torch_save,
    "torchtitan": _torchtitan,
    "accelerate": _accelerate,
    "megatron_dist": _megatron_dist,
    "megatron": _megatron,
    "deepspeed_universal": _deepspeed_universal,
    "deepspeed": _deepspeed,
    "torchsnapshot": _torchsnapshot,
}
KINDS: Final = tuple(_OPENERS)
"""Kinds of checkpoints that can be read."""
