"""What a load has done."""

from __future__ import annotations

from dataclasses import dataclass, field

from dcp_pipeline.graph.trace import Trace

__all__ = ["CastRecord", "LoadReport"]


@dataclass(frozen=True, slots=True)
class CastRecord:
    """A tensor that was converted while it was loaded.

    Attributes:
        key: its name.
        source, target: dtypes in the checkpoint and in the caller's tensor.
        overflowed: elements of this rank that do not fit the target.
    """

    key: str
    source: str
    target: str
    overflowed: int


@dataclass(frozen=True)
class LoadReport:
    """The outcome of a load on this rank. The lists are the same on every rank but ``casts``.

    Attributes:
        checkpoint_id: path or URI.
        save_id: of the save that was loaded, empty for a checkpoint of plain DCP.
        loaded: keys that this rank has loaded.
        missing, unexpected, shapes, dtypes: differences that a lenient load left alone, as in
            :class:`LoadMismatchError`.
        not_requested: keys in sections of the checkpoint that the template does not have.
        resized: values of single ranks (:class:`RankLocal`) that another number of ranks has saved:
            key, ranks that saved, ranks that loaded. Each was treated as its ``on_resize`` says.
        casts: conversions made.
        is_verified: whether everything that was read was checked against a digest.
        bytes_read: from storage, on this rank.
        trace: time per node.
    """

    checkpoint_id: str
    save_id: str
    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    shapes: list[tuple[str, object, object]]
    dtypes: list[tuple[str, object, object]]
    not_requested: list[str]
    casts: list[CastRecord]
    is_verified: bool
    bytes_read: int
    trace: Trace = field(repr=False)
    resized: list[tuple[str, object, object]] = field(default_factory=list)
