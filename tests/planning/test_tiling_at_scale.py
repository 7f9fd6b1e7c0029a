"""T49: plans of a quarter of a million chunks, cut in every way, are proven quickly."""

import time

import numpy as np
import pytest

from dcp_pipeline.core import tiling
from dcp_pipeline.core.errors import TilingError
from dcp_pipeline.core.table import ChunkTable
from dcp_pipeline.core.tiling import check_tiling
from tests.planning.states import keys_of

TENSORS = 1024
GRIDS = {"rows": (256, 1), "columns": (1, 256), "a grid": (16, 16), "a flat grid": (64, 4)}
SKIP = np.zeros(TENSORS, bool)


def grid_of(rows: int, columns: int, step: int = 3) -> ChunkTable:
    """Every tensor in ``rows`` x ``columns`` chunks, each of another rank."""
    keys = keys_of({f"w{n}": (rows * step, columns * step) for n in range(TENSORS)})
    row, column = (axis.ravel() for axis in np.indices((rows, columns)))
    offsets = np.tile(np.stack([row, column], axis=1) * step, (TENSORS, 1))
    count = rows * columns
    return ChunkTable.from_columns(
        keys,
        {
            "key": np.repeat(np.arange(TENSORS), count),
            "offsets": offsets,
            "sizes": np.full_like(offsets, step),
            "owner": np.tile(np.arange(count), TENSORS),
        },
    )


@pytest.mark.parametrize("name", GRIDS)
def test_any_cut_is_proven_in_seconds(name: str) -> None:
    table = grid_of(*GRIDS[name])
    assert len(table) == 1 << 18
    start = time.process_time()
    check_tiling(table, SKIP)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", ["rows", "columns"])
def test_tensors_cut_along_one_dimension_are_never_looked_at_one_by_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    examine = tiling._examine

    def counted(table: ChunkTable, key: int, rows: np.ndarray) -> list[str]:
        looked_at.append(key)
        return examine(table, key, rows)

    monkeypatch.setattr(tiling, "_examine", counted)
    table = grid_of(*GRIDS[name])
    check_tiling(table, SKIP)
    assert not looked_at
    table.offsets[256 * 7 + 5] += np.asarray(GRIDS[name]) > 1
    with pytest.raises(TilingError):
        check_tiling(table, SKIP)
    assert looked_at == [7]


@pytest.mark.parametrize("name", GRIDS)
def test_one_wrong_chunk_among_all_is_named_with_place_and_rank(name: str) -> None:
    rows, columns = GRIDS[name]
    place = 256 * 1000 + 100
    table = grid_of(rows, columns)
    where = table.offsets[place].tolist()
    kept = np.delete(np.arange(len(table)), place)
    with pytest.raises(TilingError) as caught:
        check_tiling(table.take(kept), SKIP)
    said = str(caught.value)
    assert "w1000 of shape" in said and f"a gap at offsets {where} sizes [3, 3]" in said
    with pytest.raises(TilingError) as caught:
        check_tiling(table.take(np.r_[np.arange(len(table)), place]), SKIP)
    said = str(caught.value)
    assert f"w1000 of shape [{rows * 3}, {columns * 3}] has an overlap at offsets {where}" in said
    assert f"rank 100 offsets {where}" in said
    table.sizes[place] = [rows * 3, columns * 3]
    with pytest.raises(TilingError, match=r"w1000 .*out of bounds: rank 100 offsets"):
        check_tiling(table, SKIP)
