"""Whether a conversion's target holds what its source gave: fingerprints taken from storage."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.crc64 import finished, raw_crc64
from dcp_pipeline.core.errors import ChecksumError, list_some
from dcp_pipeline.core.framing import frame, unframe
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.pipelines.convert import Buffers
from dcp_pipeline.pipelines.parts import Parts
from dcp_pipeline.pipelines.source import SourceReader
from dcp_pipeline.pipelines.steps.mapped_view import stored_tensors
from dcp_pipeline.storage.base import Directory
from dcp_pipeline.tools.convert_source import Chosen
from dcp_pipeline.types.streamed import Streamed

__all__ = ["check_target", "tensor_fingerprints"]


def check_target(
    location: str,
    written: Manifest,
    parts: Parts,
    coordinator: Coordinator,
    chosen: Chosen,
    recorded: Manifest | None,
    slab_bytes: int,
) -> None:
    """Read the target as anybody would, all ranks a share, and compare it with what was written.

    Args:
        written: with the fingerprints of what the source gave.
        recorded: the source's manifest, whose own fingerprints are compared too, for tensors that
            were not changed; ``None`` where all were.

    Raises:
        ChecksumError: on every rank, naming what differs.
        CheckpointException: on every rank, where any could not read the target.
    """
    message: bytes | BaseException
    try:
        problems = _problems(location, written, parts, coordinator, slab_bytes)
        if coordinator.is_coordinator:
            problems += _unlike_recorded(chosen, recorded, written)
        message = frame(problems)
    except Exception as error:
        message = error
    answer = coordinator.exchange("check", message, _union)
    (everything, _) = unframe(answer)
    if everything:
        raise ChecksumError(
            f"{location} does not hold what its source gave, in {len(everything)} places:"
            f" {list_some(everything)}. Remove it and convert again"
        )


def _problems(
    location: str, written: Manifest, parts: Parts, coordinator: Coordinator, slab_bytes: int
) -> list[str]:
    """What differs of this rank's share; the coordinator names what is lacking altogether."""
    recorded = written.fingerprint
    assert recorded is not None
    directory = parts.open_to_read(location)
    manifest = parts.layout.open(directory)
    stored = stored_tensors(manifest)
    present = [name for name in written.names if name in stored]
    mine = present[coordinator.rank :: coordinator.world_size]
    tensors = [name for name in mine if name in recorded.tensors]
    # A value that could not be read before has no fingerprint, and is not read now.
    values = [name for name in mine if recorded.values.get(name) is not None]
    found = tensor_fingerprints(directory, manifest, tensors, slab_bytes)
    found |= _value_fingerprints(directory, manifest, values, parts)
    problems = [f"{name!r} was not written as it was read" for name, one in found.items()
                if one != recorded.of(name)]  # fmt: skip
    if coordinator.is_coordinator:
        problems += [f"{name!r} is not there" for name in written.names if name not in stored]
    return problems


def _union(messages: list[bytes]) -> list[bytes]:
    problems = [problem for message in messages for problem in unframe(message)[0]]
    return [frame(problems)] * len(messages)


def _unlike_recorded(chosen: Chosen, recorded: Manifest | None, written: Manifest) -> list[str]:
    if recorded is None or recorded.fingerprint is None or written.fingerprint is None:
        return []
    tensors = written.fingerprint.tensors
    problems = []
    for name in chosen.plain:
        tensor = chosen.outcome.tensors[name]
        assert tensor is not None
        (source,) = tensor.sources
        if recorded.fingerprint.of(source) != tensors[name]:
            problems.append(f"{name!r} is not what {source!r} was when the source was saved")
    return problems


def _value_fingerprints(
    directory: Directory, manifest: Manifest, names: Sequence[str], parts: Parts
) -> dict[str, str]:
    if not names:
        return {}
    decode = parts.serialization.decode_value
    with SourceReader(directory, manifest, {}) as reader:
        digests = {name: value_digest(decode(reader.value(name))) for name in names}
    return {name: f"{digest % (1 << 64):016x}" for name, digest in digests.items()}


def tensor_fingerprints(
    directory: Directory, manifest: Manifest, names: Sequence[str], slab_bytes: int
) -> dict[str, str]:
    """CRC-64/NVME of tensors as they are read from storage, 16 hexadecimal digits each."""
    stored = stored_tensors(manifest)
    buffers, found = Buffers(), {}
    with SourceReader(directory, manifest, stored) as reader:
        for name in names:
            tensor = stored[name]
            assert tensor is not None
            zeros = (0,) * len(tensor.shape)
            fill = partial(reader.fill, name)
            streamed = Streamed(fill, tensor.dtype, zeros, tensor.shape, slab_bytes, buffers)
            raw = 0
            for segment in streamed.segments():
                raw = raw_crc64(segment, raw)
            nbytes = prod(tensor.shape) * streamed.element_size()
            found[name] = f"{finished(raw, nbytes):016x}"
    return found
