"""A checkpoint of plain DCP, as far as it can be verified: it has no digests but those of zips."""

from __future__ import annotations

import numpy as np

from dcp_pipeline.core.errors import CheckpointError, MissingFileError
from dcp_pipeline.core.manifest import Manifest, check_places
from dcp_pipeline.core.path import contradictions
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.layout import names
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.tools.verify_items import check_items
from dcp_pipeline.tools.verify_report import Findings, KeyIndex

__all__ = ["check_metadata", "verify_plain"]

_MAX_PATHS = 20


def verify_plain(directory: Directory, findings: Findings, threads: int) -> Manifest | None:
    """Note everything that is wrong; what ``.metadata`` holds, if that can be read."""
    from dcp_pipeline.layout.plain_dcp import lost_record

    strange: dict[str, CheckpointError] = {}
    manifest = _manifest(directory, findings, strange)
    if manifest is None:
        findings.cannot_verify("the data files: what they should hold stands in .metadata alone")
        return None
    lost = lost_record(manifest, directory.location)
    if lost is not None:
        findings.add(names.MANIFEST, lost)
    for text in tiling_problems(manifest.table, np.zeros(len(manifest.names), bool)):
        findings.add(names.METADATA, text, "chunks that cover every tensor once")
    for text in contradictions(spec.path for spec in manifest.table.keys)[:_MAX_PATHS]:
        findings.add(names.METADATA, text, "keys of one nested state")
    index = KeyIndex(manifest)
    table = manifest.table
    for number, entry in enumerate(manifest.files):
        rows = index.rows(number)
        ends = [int(table.offset[row] + table.length[row]) for row in rows]
        if entry.size < 0:
            keys = index.at(number, 0, 1 << 62)
            found = strange.get(entry.name, "it is missing")
            findings.add(entry.name, found, f"a file of {max(ends)} bytes or more", keys)
            findings.mark_damaged(number, 0, 1 << 62)
            continue
        findings.count_file()
        if max(ends) > entry.size:
            keys = index.at(number, entry.size, 1 << 62)
            size = f"it has {entry.size} bytes: it was cut off"
            findings.add(entry.name, size, f"{max(ends)} bytes or more", keys)
            findings.mark_damaged(number, entry.size, 1 << 62)
        elif max(ends) < entry.size:
            findings.note(f"{entry.name} has {entry.size - max(ends)} bytes that belong to no item")
    findings.total_bytes = sum(max(entry.size, 0) for entry in manifest.files)
    check_items(directory, manifest, index, findings, threads)
    if not findings.problems:
        try:
            check_places(manifest)  # what a load would refuse
        except CheckpointError as error:
            findings.add(names.METADATA, error)
    findings.cannot_verify(
        "what is no content of a zip record (headers, padding), and .metadata: plain DCP keeps no"
        " digest of them"
    )
    return manifest


def _manifest(
    directory: Directory, findings: Findings, strange: dict[str, CheckpointError]
) -> Manifest | None:
    from dcp_pipeline.formats.metadata_pickle import read_metadata
    from dcp_pipeline.layout.dcp_metadata import manifest_of
    from dcp_pipeline.layout.plain_dcp import plain_manifest

    try:
        if not directory.exists(names.METADATA):
            return plain_manifest(directory)
        data = directory.read(names.METADATA)
        findings.count(len(data))
        return manifest_of(read_metadata(data), _sizes(directory, strange))
    except CheckpointError as error:
        findings.add(names.METADATA, error)
        return None


def _sizes(directory: Directory, strange: dict[str, CheckpointError]) -> dict[str, int]:
    """Bytes of the data files; what is there instead of a file goes into ``strange``."""
    sizes = {}
    for name in filter(names.is_data, directory.names()):
        try:
            with directory.open(name) as source:
                sizes[name] = source.size
        except MissingFileError:
            continue
        except CheckpointError as error:
            strange[name] = error
    return sizes


def check_metadata(data: bytes, manifest: Manifest, findings: Findings) -> None:
    """Compare what DCP would read in ``.metadata`` with the manifest, key by key."""
    from dcp_pipeline.formats.metadata_pickle import read_metadata
    from dcp_pipeline.layout.dcp_metadata import metadata_of

    try:
        found = read_metadata(data)
    except CheckpointError as error:
        findings.add(names.METADATA, error, "DCP's metadata of the same chunks")
        return
    wanted = metadata_of(manifest, "")
    tensors, places = wanted.state_dict_metadata, wanted.storage_data or {}
    stored = found.storage_data if isinstance(found.storage_data, dict) else {}
    paths, kept = wanted.planner_data, found.planner_data
    different = {
        key
        for key in tensors.keys() | found.state_dict_metadata.keys()
        if tensors.get(key) != found.state_dict_metadata.get(key)
        or not isinstance(kept, dict)
        or paths.get(key) != kept.get(key)
    }
    different |= {
        index.fqn
        for index in places.keys() | stored.keys()
        if places.get(index) != stored.get(index)
    }
    if different:
        findings.add(
            names.METADATA,
            "its keys, shapes or places are not those of the manifest",
            "both of one save",
            tuple(sorted(different)),
        )
