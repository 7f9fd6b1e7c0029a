"""Reads every byte of a checkpoint and says what is not as it was written.

For a checkpoint of ours no torch is needed but for what torch wrote: zip items and ``.metadata``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.errors import CheckpointError, CheckpointNotFoundError, MissingFileError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import contradictions
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.layout import names
from dcp_pipeline.layout.record import live_saves
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.storage.filesystem import FileSystemStorage
from dcp_pipeline.tools.opening import look, open_directory, read_manifest
from dcp_pipeline.tools.verify_blocks import check_blocks, check_sums
from dcp_pipeline.tools.verify_items import check_items
from dcp_pipeline.tools.verify_plain import check_metadata, verify_plain
from dcp_pipeline.tools.verify_report import Findings, KeyIndex, Problem, Progress, VerifyReport
from dcp_pipeline.tools.verify_repositories import verify_huggingface, verify_mega
from dcp_pipeline.tools.verify_values import ValueCheck

__all__ = ["Problem", "VerifyReport", "verify", "verify_all"]

_ATTEMPTS = 3
_MAX_PATHS = 20
_STALE_AFTER = 600.0


def verify(
    path: str | os.PathLike[str],
    *,
    threads: int = 4,
    progress: Progress | None = None,
) -> VerifyReport:
    """Read every byte of the checkpoint at ``path``, ours or plain DCP's.

    Args:
        path: a directory, or a ``file://`` URI.
        threads: that read at a time, each through a buffer of 4 MiB.
        progress: called with the bytes read so far and the bytes to read.

    Raises:
        ConfigError: a URI of another scheme.
        CheckpointNotFoundError: there is no checkpoint; ``IncompleteCheckpointError`` where one was
            begun and never committed. What is damaged is in the report.

    Example:
        >>> import tempfile, torch, dcp_pipeline
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = dcp_pipeline.save({"weight": torch.ones(4)}, checkpoint_id=folder)
        ...     report = dcp_pipeline.verify(folder)
        >>> report.is_well, report.keys, report.not_verified
        (True, 1, ())
    """
    directory = open_directory(path)
    for attempt in range(_ATTEMPTS):
        before = _record(directory)
        report = _verify_once(directory, threads, Findings(progress=progress))
        if report.is_well or _record(directory) == before or attempt == _ATTEMPTS - 1:
            break  # else another save has replaced it meanwhile
    return report


def verify_all(
    path: str | os.PathLike[str],
    *,
    threads: int = 4,
    progress: Callable[[str], Progress] | None = None,
) -> tuple[VerifyReport, ...]:
    """Verify the checkpoint at ``path``, or every one in it.

    What was begun and never committed is no problem: its report is of kind ``not committed``.

    Args:
        progress: makes the callback for one directory, whose path it is given.

    Raises:
        ConfigError, CheckpointNotFoundError: as :func:`verify`.
    """
    directory = open_directory(path)
    folders = [os.path.join(directory.location, name) for name in directory.names()]
    places = [folder for folder in folders if os.path.isdir(folder) and not os.path.islink(folder)]
    found = [place for place in places if _has_checkpoint(place)]
    if look(directory).is_checkpoint or not found:
        found.insert(0, directory.location)
    if found == [directory.location]:
        return (verify(path, threads=threads, progress=progress and progress(found[0])),)
    return tuple(_verify_place(place, threads, progress and progress(place)) for place in found)


def _has_checkpoint(path: str) -> bool:
    try:
        return look(FileSystemStorage().open(path)).is_checkpoint
    except (CheckpointError, OSError, MemoryError, RecursionError):
        return True


def _verify_place(path: str, threads: int, progress: Progress | None) -> VerifyReport:
    findings = Findings()
    try:
        return verify(path, threads=threads, progress=progress)
    except CheckpointNotFoundError as error:
        findings.note(str(error))
        return findings.report(path, "not committed", None)
    except (CheckpointError, OSError, MemoryError, RecursionError) as error:
        # One that cannot be looked into does not hide the others.
        findings.add("", str(error) or type(error).__name__)
        return findings.report(path, "unreadable", None)


def _record(directory: Directory) -> list[bytes | None]:
    found: list[bytes | None] = []
    for name in (names.MANIFEST, names.METADATA):
        try:
            found.append(digest_of("xxh3_64", directory.read(name)))
        except CheckpointError:
            found.append(None)
    return found


def _verify_once(directory: Directory, threads: int, findings: Findings) -> VerifyReport:
    found = look(directory)
    if found.is_mega:
        manifest = verify_mega(directory, findings, threads)
        return findings.report(directory.location, "MEGA", manifest)
    if found.is_huggingface:
        manifest = verify_huggingface(directory, findings, threads)
        return findings.report(directory.location, "Hugging Face", manifest)
    if not found.has_manifest and not found.has_metadata:
        read_manifest(directory, found)  # which says what is there instead
    if not found.has_manifest:
        manifest = verify_plain(directory, findings, threads)
        _note_others(directory, manifest, findings)
        kind = "dcp_pipeline" if manifest and _saves_in(manifest) else "plain DCP"
        return findings.report(directory.location, kind, manifest)
    try:
        data = directory.read(names.MANIFEST)
        manifest = Manifest.decode(data)
    except CheckpointError as error:
        findings.add(names.MANIFEST, error)
        findings.cannot_verify("all other files: what they should hold stands in manifest.json")
        return findings.report(directory.location, "dcp_pipeline", None)
    sizes = [file.size for file in manifest.files] + [sums.size for sums in manifest.sums]
    findings.total_bytes = len(data) + sum(sizes)
    findings.count(len(data))
    findings.count_file()
    _verify_ours(directory, manifest, findings, threads)
    _note_others(directory, manifest, findings)
    return findings.report(directory.location, "dcp_pipeline", manifest)


def _verify_ours(
    directory: Directory, manifest: Manifest, findings: Findings, threads: int
) -> None:
    is_alias = np.asarray([spec.alias >= 0 for spec in manifest.table.keys], bool)
    gaps = tiling_problems(manifest.table, is_alias)
    for text in gaps:
        findings.add(names.MANIFEST, text, "chunks that cover every tensor once")
    for text in contradictions(spec.path for spec in manifest.table.keys)[:_MAX_PATHS]:
        findings.add(names.MANIFEST, text, "keys of one nested state")
    index = KeyIndex(manifest)
    values = ValueCheck(manifest, index, findings, is_tiled=not gaps)
    if manifest.checksum is None:
        findings.cannot_verify("the bytes of the data files: they were saved without digests")
    else:
        sums = check_sums(directory, manifest, findings)
        check_blocks(directory, manifest, sums, index, findings, threads, values)
    check_items(directory, manifest, index, findings, threads, values)
    values.compare()
    _check_metadata_file(directory, manifest, findings)


def _check_metadata_file(directory: Directory, manifest: Manifest, findings: Findings) -> None:
    entry = manifest.metadata
    try:
        data = directory.read(names.METADATA)
    except MissingFileError:
        if entry is not None:
            findings.add(
                names.METADATA,
                "it is missing: plain DCP cannot open the checkpoint, this package can",
                f"{entry.size} bytes",
            )
        return
    except CheckpointError as error:
        findings.add(names.METADATA, error)
        return
    findings.count(len(data))
    findings.count_file()
    digest = digest_of("xxh3_64", data).hex()
    if entry is not None and (len(data), digest) == (entry.size, entry.digest):
        check_metadata(data, manifest, findings)
    elif digest == manifest.superseded:
        findings.note(
            f"{names.METADATA} is of the checkpoint that this one has replaced: the save was killed"
            " between two steps. This package opens the new one; save again for plain DCP"
        )
    else:
        wanted = "none" if entry is None else f"{entry.size} bytes with the digest {entry.digest}"
        findings.add(
            names.METADATA,
            f"it has {len(data)} bytes with the digest {digest}: it was changed, or plain DCP has"
            " saved over the checkpoint",
            wanted,
        )


def _saves_in(manifest: Manifest) -> set[str]:
    """The first digits of the ids of saves of ours whose data files are named."""
    return {save for file in manifest.files if (save := names.save_of(file.name))}


def _note_others(directory: Directory, manifest: Manifest | None, findings: Findings) -> None:
    """Files that are no part of the checkpoint."""
    listed = directory.names()
    known = {names.MANIFEST, names.METADATA}
    if manifest is not None:
        known |= {file.name for file in manifest.files} | {sums.name for sums in manifest.sums}
    alive = live_saves(directory, listed, _STALE_AFTER)
    own = "" if manifest is None else manifest.save_id[:8]
    lost = set() if manifest is None or own else _saves_in(manifest)
    for name in sorted(set(listed) - known):
        save = names.save_of(name)
        if os.path.isdir(os.path.join(directory.location, name)):
            continue
        if save is not None and save in alive:
            findings.note(f"{name} belongs to a save that is under way")
        elif save in lost and not names.marker_save_id(name):
            continue  # digests of what .metadata names
        elif save is not None and save == own and not names.marker_save_id(name):
            findings.add(name, "it carries the id of this save", "no such file in the manifest")
        elif save is not None:
            findings.note(f"{name} was left by a save that never finished: prune removes it")
        elif name not in {names.rank_metadata_name(r) for r in names.metadata_ranks(listed)}:
            findings.note(f"{name} is no part of the checkpoint")
