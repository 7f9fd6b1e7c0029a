"""A disk that is really full, no inodes left, a limit of the size of files."""

from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.faults_running.full import can_mount, limited, on_small_disk, without_inodes
from tests.marks import slow


@pytest.fixture
def mount_path(tmp_path: Path) -> Path:
    path = tmp_path / "mounted"
    if not can_mount(path):
        pytest.skip("mounting needs rights that this process has not")
    return path


@pytest.mark.parametrize(
    ("direct_io", "reserve_space"),
    [(True, True), slow(True, False), slow(False, True), (False, False)],
    ids=["direct-reserved", "direct-not reserved", "cached-reserved", "cached-not reserved"],
)
def test_a_full_disk(mount_path: Path, reserve_space: bool, direct_io: bool) -> None:
    assert on_small_disk(mount_path, reserve_space, direct_io) == []


def test_no_inodes(mount_path: Path) -> None:
    assert without_inodes(mount_path) == []


@pytest.mark.parametrize(("reserve_space", "direct_io"), [(True, True), (False, False)])
def test_a_limit_of_the_size_of_files(
    ranks: Pool, tmp_path: Path, reserve_space: bool, direct_io: bool
) -> None:
    assert ranks(1).run(limited, tmp_path, reserve_space, direct_io) == [[]]
