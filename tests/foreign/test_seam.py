"""What a manifest may say of foreign files: values of its own, and strides."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline.core.errors import CorruptCheckpointError, FormatError, UnsafeCheckpointError
from dcp_pipeline.core.manifest import Manifest, check_places
from dcp_pipeline.layout.foreign import building
from dcp_pipeline.layout.foreign.building import Building, Chunk
from dcp_pipeline.storage.memory import MemoryStorage
from tests.foreign.loading import opened


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    state = {"turned": torch.arange(6.0).view(2, 3).t(), "plain": torch.ones(2), "step": 3}
    torch.save(state, tmp_path / "x.pt")
    found = opened(tmp_path / "x.pt")
    assert (list(found.inline), found.strided) == ([2], {0: (1, 3)})
    return found


OURS = "0" * 32
CHANGES: dict[str, dict[str, Any]] = {
    "values in a manifest of ours": {"save_id": OURS, "strided": {}},
    "a value under a tensor": {"inline": {1: b""}},
    "a value under no key": {"inline": {3: b""}},
    "strides in a manifest of ours": {"save_id": OURS, "inline": {}},
    "strides of no row": {"strided": {2: (1,)}},
    "too few strides": {"strided": {0: (1,)}},
    "strides that leave the item": {"strided": {0: (1, 4)}},
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_what_no_manifest_may_say(manifest: Manifest, name: str) -> None:
    check_places(manifest)
    with pytest.raises(FormatError):
        check_places(replace(manifest, **CHANGES[name]))


def test_a_value_may_not_lie_in_two_places(manifest: Manifest) -> None:
    table = manifest.table
    rows = table.take([0, 1, 1])
    key = rows.key.copy()
    key[2] = 2
    with pytest.raises(FormatError, match="in the manifest and in a file"):
        check_places(replace(manifest, table=replace(rows, key=key)))


def building_of(size: int = 16) -> Building:
    directory = MemoryStorage().open("memory://seam")
    directory.put_whole("f", bytes(size))
    return Building(directory, "test")


@pytest.mark.parametrize(
    "chunks",
    [
        [Chunk(0, 0, 16, (0,), (4,)), Chunk(0, 0, 4, (0,), (1,))],  # an overlap
        [Chunk(0, 0, 12, (0,), (3,))],  # a gap
        [Chunk(0, 4, 16, (0,), (4,))],  # beyond the file
        [Chunk(0, -4, 16, (0,), (4,))],
        [Chunk(0, 0, 16, (-1,), (4,))],
        [Chunk(0, 0, 16, (0,), (1 << 63,))],
        [Chunk(1, 0, 16, (0,), (4,))],  # a file that is not there
    ],
)
def test_places_that_lie(chunks: list[Chunk]) -> None:
    made = building_of()
    made.file("f")
    made.tensor(("w",), "float32", (4,), chunks)
    with pytest.raises(CorruptCheckpointError):
        made.manifest()


def test_absurd_shapes_and_names_given_twice() -> None:
    made = building_of()
    made.tensor(("w",), "float32", (1 << 40, 1 << 40), [])
    with pytest.raises(FormatError, match="absurd shape"):
        made.manifest()
    made = building_of()
    for _ in range(2):
        made.value(("a",), 1)
    with pytest.raises(FormatError, match="two keys lie at one place"):
        made.manifest()


def test_files_that_lead_out() -> None:
    for name in ("/etc/passwd", "../x", "a/../../x", ""):
        with pytest.raises(UnsafeCheckpointError):
            building_of().file(name)


def test_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_MOST_INLINE", 10_000)
    made = building_of()
    with pytest.raises(UnsafeCheckpointError, match="more than 10000 bytes"):
        for number in range(100):
            made.value((f"v{number}",), number)
