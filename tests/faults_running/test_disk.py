"""System errors at every change that a save makes: one process, and each of two ranks."""

import errno
import shutil
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.faults_running.disk import counted, problems_on_ranks, problems_with
from tests.faults_running.faulty import SPACE_CODES, TAKES_SPACE, Fault, ShortWrites
from tests.faults_running.jobs import check_loads, left_over, nothing_leaks, save
from tests.marks import slow

CODES = [
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.EACCES,
]
OTHERS = [code for code in CODES if code != errno.EIO]


def name(value: object) -> str | None:
    return errno.errorcode[value] if isinstance(value, int) and value in CODES else None


def faults(count: int, codes: list[int], is_done: bool = False) -> list[Fault]:
    """One at every change, the codes in turn; a disk that is full stays so."""
    return [
        Fault(number, code, is_done, TAKES_SPACE if code in SPACE_CODES and not is_done else ())
        for number in range(count)
        for code in [codes[number % len(codes)]]
    ]


def sweep(path: Path, is_over_old: bool, codes: list[int], is_done: bool) -> None:
    old = path / "old"
    if is_over_old:
        save(old, 1)
        shutil.copytree(old, path / "counted" / "checkpoint")
    made = counted(path / "counted" / "checkpoint")
    methods = {"create", "reserve", "write", "sync", "close", "replace", "symlink", "remove"}
    assert methods < {method for method, _ in made}
    with nothing_leaks():
        assert problems_with(old, path / "work", faults(len(made), codes, is_done)) == []


@pytest.mark.parametrize(
    ("is_over_old", "is_done"),
    [(True, False), slow(True, True), slow(False, False), (False, True)],
    ids=[
        "over another-not made",
        "over another-made all the same",
        "new-not made",
        "new-made all the same",
    ],
)
def test_an_error_at_every_change(memory_path: Path, is_over_old: bool, is_done: bool) -> None:
    sweep(memory_path, is_over_old, [errno.EIO], is_done)


def test_every_error_in_turn(memory_path: Path) -> None:
    sweep(memory_path, True, OTHERS, False)


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True], ids=["not made", "made all the same"])
@pytest.mark.parametrize("is_over_old", [True, False], ids=["over another", "new"])
@pytest.mark.parametrize("code", OTHERS, ids=name)
def test_every_error_at_every_change(
    memory_path: Path, code: int, is_over_old: bool, is_done: bool
) -> None:
    sweep(memory_path, is_over_old, [code], is_done)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_of_two_ranks(ranks: Pool, memory_path: Path, rank: int) -> None:
    found = ranks(2).run(problems_on_ranks, memory_path, rank, CODES, 4, seconds=120.0)
    assert [problems for problems, _ in found] == [[], []]
    assert found[rank][1] >= 3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("code", CODES, ids=name)
def test_every_error_everywhere_on_one_of_two_ranks(
    ranks: Pool, memory_path: Path, code: int, rank: int
) -> None:
    found = ranks(2).run(problems_on_ranks, memory_path, rank, [code], 1, seconds=250.0)
    assert [problems for problems, _ in found] == [[], []]
    assert found[rank][1] >= 15


def test_short_writes_simply_succeed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, ShortWrites())
    check_loads(tmp_path, 2)
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EROFS, slow(errno.EIO)], ids=name)
def test_a_file_system_that_fails_for_good(memory_path: Path, code: int) -> None:
    """Nothing can be removed either; what is left goes with the next save once it works again."""
    save(memory_path / "old", 1)
    shutil.copytree(memory_path / "old", memory_path / "counted" / "checkpoint")
    made = counted(memory_path / "counted" / "checkpoint")
    lasting = tuple({method for method, _ in made})
    chosen = [Fault(number, code, False, lasting) for number in range(0, len(made), 2)]
    with nothing_leaks():
        problems = problems_with(memory_path / "old", memory_path / "work", chosen, may_leave=True)
    assert problems == []
