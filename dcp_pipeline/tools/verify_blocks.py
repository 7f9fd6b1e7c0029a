"""Every byte of the data files against the digests of their blocks. No torch is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from dcp_pipeline.core.checksum import block_digests, digest_size
from dcp_pipeline.core.errors import CheckpointError, MissingFileError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.sums import BlockSums, parse_sums, sums_digest
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.tools.verify_report import Findings, KeyIndex
from dcp_pipeline.tools.verify_values import ValueCheck

__all__ = ["check_blocks", "check_sums", "in_threads"]

_TASK_BYTES = 64 << 20
_STEP_BYTES = 4 << 20
_MAX_RANGES = 20


def in_threads(
    threads: int, name: str, action: Callable[..., None], tasks: Iterable[tuple[object, ...]]
) -> None:
    """Call ``action`` for every task; the first error is raised once all have ended."""
    with ThreadPoolExecutor(threads, f"dcp_pipeline {name}") as pool:
        futures = [pool.submit(action, *task) for task in tasks]
    for future in futures:
        future.result()


def check_sums(
    directory: Directory, manifest: Manifest, findings: Findings
) -> dict[str, BlockSums]:
    """The digests of every data file, of those sums files that are what was written."""
    result: dict[str, BlockSums] = {}
    for entry in manifest.sums:
        try:
            size = directory.size(entry.name)
            if size != entry.size:
                findings.add(entry.name, f"it has {size} bytes", f"{entry.size} bytes")
                continue
            data = directory.read(entry.name, 0, entry.size)
            findings.count(len(data))
            assert manifest.checksum is not None
            found = sums_digest(manifest.checksum, data)
            if found != entry.digest:
                findings.add(entry.name, f"its digest is {found}", entry.digest)
                continue
            parsed = parse_sums(data)
        except MissingFileError:
            findings.add(entry.name, "it is missing", f"{entry.size} bytes")
            continue
        except CheckpointError as error:
            findings.add(entry.name, error)
            continue
        findings.count_file()
        for name, sums in parsed.items():
            if (sums.algorithm, sums.block_bytes) != (manifest.checksum, manifest.block_bytes):
                findings.add(
                    entry.name,
                    f"it has {sums.algorithm} of every {sums.block_bytes} bytes",
                    f"{manifest.checksum} of every {manifest.block_bytes}, as the manifest says",
                )
            elif name in result:
                findings.add(entry.name, f"{name} is covered by another file too")
            else:
                result[name] = sums
    listed = {file.name for file in manifest.files}
    for name in sorted(result.keys() - listed):
        findings.add(name, "there are digests of it, but the manifest does not list it")
        del result[name]
    return result


def check_blocks(
    directory: Directory,
    manifest: Manifest,
    sums: Mapping[str, BlockSums],
    index: KeyIndex,
    findings: Findings,
    threads: int,
    values: ValueCheck,
) -> None:
    """Read every data file whole, and name what lies in blocks that are not what was written.

    Args:
        values: gets to see the same bytes.
    """
    tasks: list[tuple[int, BlockSums, int, int]] = []
    bad: dict[int, list[int]] = {}
    for number, entry in enumerate(manifest.files):
        size = _size(directory, manifest, number, index, findings)
        known = sums.get(entry.name)
        if size is None:
            continue
        if known is None or known.size != entry.size:
            findings.add(
                entry.name,
                "there are no digests of it"
                if known is None
                else f"digests are of {known.size} bytes",
                f"digests of its {entry.size} bytes",
                index.at(number, 0, entry.size),
                index.rank(number),
            )
            continue
        bad[number] = []
        step = max(known.block_bytes, _TASK_BYTES // known.block_bytes * known.block_bytes)
        end = min(size, entry.size)
        tasks += [(number, known, at, min(at + step, end)) for at in range(0, end, step)]

    def check(number: int, known: BlockSums, begin: int, end: int) -> None:
        name = known.name
        try:
            with directory.open(name) as source:
                step = max(known.block_bytes, _STEP_BYTES // known.block_bytes * known.block_bytes)
                buffer = bytearray(min(step, end - begin))
                reading = values.reading(number, begin, end)
                for at in range(begin, end, step):
                    view = memoryview(buffer)[: min(step, end - at)]
                    source.read_into(at, view)
                    findings.count(len(view))
                    bad[number] += _bad_blocks(known, view, at // known.block_bytes)
                    if reading is not None:
                        reading.add(at, view)
                if reading is not None:
                    reading.finish()
        except CheckpointError as error:
            findings.add(name, error, "", index.at(number, begin, end), index.rank(number))
            findings.mark_damaged(number, begin, end)

    in_threads(threads, "verify", check, tasks)
    for number, blocks in bad.items():
        _report(manifest, number, sorted(blocks), index, findings)
        findings.count_file()


def _size(
    directory: Directory, manifest: Manifest, number: int, index: KeyIndex, findings: Findings
) -> int | None:
    """The size that a file has; a wrong one is a problem, and ``None`` where it cannot be read."""
    entry = manifest.files[number]
    rank = index.rank(number)
    try:
        with directory.open(entry.name) as source:
            size = source.size
    except MissingFileError:
        keys = index.at(number, 0, entry.size)
        findings.add(entry.name, "it is missing", f"{entry.size} bytes", keys, rank)
        findings.mark_damaged(number, 0, entry.size)
        return None
    except CheckpointError as error:
        findings.add(entry.name, error, "", index.at(number, 0, entry.size), rank)
        findings.mark_damaged(number, 0, entry.size)
        return None
    if size != entry.size:
        how = "it was cut off" if size < entry.size else "it was appended to"
        keys = index.at(number, size, entry.size) if size < entry.size else ()
        findings.add(entry.name, f"it has {size} bytes: {how}", f"{entry.size} bytes", keys, rank)
        findings.mark_damaged(number, size, entry.size)
    return size


def _bad_blocks(sums: BlockSums, data: memoryview, first: int) -> list[int]:
    width = digest_size(sums.algorithm)
    wanted = sums.digests[first * width :]
    found = block_digests(sums.algorithm, data, sums.block_bytes)
    if wanted.startswith(found):
        return []
    return [
        first + block
        for block in range(len(found) // width)
        if found[block * width :][:width] != wanted[block * width :][:width]
    ]


def _report(
    manifest: Manifest, number: int, blocks: Sequence[int], index: KeyIndex, findings: Findings
) -> None:
    """Runs of bad blocks, each with the keys that lie in it."""
    entry, block_bytes = manifest.files[number], manifest.block_bytes
    count = -(-entry.size // block_bytes)
    cuts = [at for at, (one, next_one) in enumerate(pairwise(blocks), 1) if next_one != one + 1]
    runs = [blocks[a:b] for a, b in pairwise([0, *cuts, len(blocks)])] if blocks else []
    shown = runs if len(runs) <= _MAX_RANGES else [*runs[: _MAX_RANGES - 1], blocks]
    for run in shown:
        begin, end = run[0] * block_bytes, min((run[-1] + 1) * block_bytes, entry.size)
        findings.mark_damaged(number, begin, end)
        if len(run) == count and count > 1:
            found = "none of its blocks is what was written: it is another file of that size"
        elif len(run) == 1:
            found = f"block {run[0]} (bytes {begin} to {end}) is not what was written"
        else:
            found = f"{len(run)} of the blocks {run[0]} to {run[-1]} are not what was written"
        findings.add(
            entry.name,
            found,
            f"their {manifest.checksum} digests",
            index.at(number, begin, end),
            index.rank(number),
        )
