"""Opens what is to be converted or compared, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dcp_pipeline.core.checksum import digest_of
from dcp_pipeline.core.coordinator import Coordinator
from dcp_pipeline.core.errors import DisagreementError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.layout.foreign import open_source
from dcp_pipeline.storage.base import Directory

__all__ = ["open_on_ranks"]


def open_on_ranks(
    path: str, kind: str | None, options: Mapping[str, Any], coordinator: Coordinator
) -> tuple[Directory, Manifest]:
    """A checkpoint of any kind, as every rank finds it.

    Raises:
        CheckpointException: a rank cannot open it, or finds another one there.
    """
    opened: tuple[Directory, Manifest] | None = None
    message: bytes | BaseException
    try:
        opened = open_source(path, kind, options)
        # A set of texts is pickled in another order by every process.
        values = dict.fromkeys(opened[1].inline, b"")
        message = digest_of("sha256", replace(opened[1], inline=values).encode())
    except Exception as error:
        message = error

    def compare(messages: list[bytes]) -> list[bytes]:
        if len(set(messages)) > 1:
            raise DisagreementError(f"the ranks do not find the same checkpoint at {path}")
        return [b""] * len(messages)

    coordinator.exchange("open", message, compare)
    assert opened is not None
    return opened
