"""The format is made for thousands of ranks: sizes of what is written and of what travels."""

import json
import sys

import numpy as np
import pytest

from dcp_pipeline.core.framing import frame
from dcp_pipeline.core.manifest import FileEntry, Manifest, SumsEntry
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.layout.names import data_name, sums_name
from dcp_pipeline.planning.base import GlobalPlan
from dcp_pipeline.planning.default import DefaultPlanner
from tests.planning.states import keys_of, sharded

RANKS, TENSORS = 2048, 1000
SAVE_ID = "0123456789abcdef" * 2


def shapes() -> dict[str, tuple[int, ...]]:
    """Sizes as in a transformer, some of which the ranks do not divide."""
    return {
        f"model.layers.{i // 10}.part{i % 10}.weight": (
            2048 * (i % 7 + 1) - i % 3,
            64 * (i % 5 + 1),
        )
        for i in range(TENSORS)
    }


class Lines:
    """Counts the lines of the package that run: a loop over chunks would run millions."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Lines":
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: object, event: str, argument: object) -> object:
        return self._line if "dcp_pipeline" in frame.f_code.co_filename else None  # type: ignore[attr-defined]

    def _line(self, frame: object, event: str, argument: object) -> object:
        self.count += event == "line"
        return self._line


@pytest.fixture(scope="module")
def tables() -> list[ChunkTable]:
    keys = keys_of(shapes())
    return [sharded(keys, rank, RANKS) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def plan(tables: list[ChunkTable]) -> GlobalPlan:
    return DefaultPlanner().global_plan(tables)


def test_a_ranks_message_is_small(tables: list[ChunkTable]) -> None:
    for rank in (0, 1, 1000, RANKS - 1):
        assert len(frame({"checkpoint_id": "x" * 100}, tables[rank].pack())) < 16 << 10


def placed(plan: GlobalPlan) -> Manifest:
    """The manifest after every rank has written its chunks one after another into one file."""
    table = plan.table
    first = np.r_[True, np.diff(table.owner) != 0]
    length = table.nbytes + 600
    padded = -(-length // 64) * 64
    end = np.cumsum(padded)
    start = (end - padded)[first]
    offset = end - padded - np.repeat(start, np.diff(np.r_[np.flatnonzero(first), len(table)]))
    places = {"file": table.owner, "offset": offset, "length": length,
              "payload": np.full(len(table), 512, np.int64)}  # fmt: skip
    filled = ChunkTable.from_columns(table.keys, table.columns("key", "owner") | places)
    sizes = np.zeros(RANKS, np.int64)
    np.maximum.at(sizes, table.owner, offset + length)
    return Manifest(
        save_id=SAVE_ID,
        created=1.7e9,
        world_size=RANKS,
        serialization="torch_save",
        layout="dcp",
        names=plan.names,
        table=filled.sort(),
        files=tuple(FileEntry(data_name(rank, 0, SAVE_ID, ".distcp"), int(size))
                    for rank, size in enumerate(sizes)),
        sums=tuple(SumsEntry(sums_name(rank, SAVE_ID), 4096, f"{rank:016x}")
                   for rank in range(RANKS)),
        checksum="xxh3_64",
        block_bytes=64 << 10,
    )  # fmt: skip


def test_the_manifest_of_two_million_chunks_is_small_and_comes_back(plan: GlobalPlan) -> None:
    assert len(plan.table) > 1_900_000
    manifest = placed(plan)
    data = manifest.encode()
    assert len(data) <= 8 << 20
    again = Manifest.decode(data)
    assert again.names == manifest.names and again.files == manifest.files
    for name, column in manifest.table.columns("key", "file", "offset", "length").items():
        assert np.array_equal(getattr(again.table, name), column), name
    assert json.loads(data)["chunks"]["count"] == len(plan.table)


def test_planning_and_writing_run_no_loop_over_chunks() -> None:
    """Lines of Python may grow with keys and ranks, not with their product."""
    keys = keys_of({f"w{i}": (512, 8) for i in range(200)})
    tables = [sharded(keys, rank, 256) for rank in range(256)]
    chunks = sum(map(len, tables))
    assert chunks == 200 * 256
    with Lines() as lines:
        plan = DefaultPlanner().global_plan(tables)
        data = plan.table.pack()
        ChunkTable.unpack(data)
    assert lines.count < chunks
