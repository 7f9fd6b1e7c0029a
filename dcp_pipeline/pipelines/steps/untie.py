"""Node ``untie`` of an export: every name gets elements of its own."""

from __future__ import annotations

from dataclasses import replace

from dcp_pipeline.types.entries import Entries

__all__ = ["untie"]


def untie(staged: Entries) -> Entries:
    """Entries of which none is another one by a second name."""
    return Entries(
        replace(entry, alias=-1, pieces=staged[entry.alias].pieces) if entry.alias >= 0 else entry
        for entry in staged
    )
