"""Reading fails on one rank: all ranks raise alike, and everything is as it was."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.faults_running.reads import HOW, failing_loads, save_rich

CONFIGS = [
    {"rollback": rollback, "read_replicas": replicas}
    for rollback in ("copy", "verify_first")
    for replicas in ("each", "once")
]


def names(value: Any) -> str | None:
    return "-".join(value.values()) if isinstance(value, dict) else None


@pytest.mark.parametrize("config", CONFIGS, ids=names)
@pytest.mark.parametrize(("how", "rank"), [("EIO", 1), ("vanishes", 0)])
def test_every_read_fails_in_turn(
    ranks: Pool, tmp_path: Path, how: str, rank: int, config: dict[str, Any]
) -> None:
    ranks(2).run(save_rich, tmp_path)
    found = ranks(2).run(failing_loads, tmp_path, rank, how, config, seconds=120.0)
    assert found == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=names)
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("how", HOW)
def test_every_read_fails_in_every_way(
    ranks: Pool, tmp_path: Path, how: str, rank: int, config: dict[str, Any]
) -> None:
    ranks(3).run(save_rich, tmp_path)
    found = ranks(3).run(failing_loads, tmp_path, rank, how, config, seconds=200.0)
    assert found == [[], [], []]
