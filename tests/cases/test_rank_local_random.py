"""Random states of single ranks: T52."""

import logging
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline import RankLocal, RngState
from dcp_pipeline.core.errors import WorldSizeMismatchError
from tests.cases.jobs import load_state, pipeline_of, save_state
from tests.cases.rank_locals import KINDS, draw, scramble
from tests.distributed.pool import Pool
from tests.marks import mostly_slow


def save_random(path: Path, config: dict[str, Any]) -> list[Any]:
    scramble(100 + dist.get_rank())
    save_state({"rng": RankLocal(RngState())}, path, config)
    return draw()


def load_random(path: Path, rule: str, config: dict[str, Any]) -> tuple[list[Any], list[Any], Any]:
    """What is drawn after the load, what would have been without it, and the report."""
    seed = 200 + dist.get_rank()
    scramble(seed)
    without = draw()
    scramble(seed)
    with pipeline_of(config) as pipeline:
        report = pipeline.load({"rng": RankLocal(RngState(), on_resize=rule)}, path)
    return draw(), without, report.resized


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", mostly_slow([1, 2, 4], [2]))
def test_t52_every_rank_goes_on_with_its_own_numbers(
    ranks: Pool, tmp_path: Path, world: int, kind: str
) -> None:
    config = {"serialization": kind}
    saved = ranks(world).run(save_random, tmp_path, config)
    assert len({str(numbers) for numbers in saved}) == world
    for rule in ("error", "fresh", "first"):
        found = ranks(world).run(load_random, tmp_path, rule, config)
        assert [after for after, _, _ in found] == saved
        assert all(resized == [] for _, _, resized in found)


@pytest.mark.parametrize(
    ("world", "kind"),
    mostly_slow(product([1, 3], KINDS), [(1, "torch_save"), (3, "safetensors")]),
)
def test_t52_on_another_number_of_ranks_all_do_alike(
    ranks: Pool, tmp_path: Path, world: int, kind: str
) -> None:
    config = {"serialization": kind}
    saved = ranks(2).run(save_random, tmp_path, config)
    errors = ranks(world).fail(load_random, tmp_path, "error", config)
    assert len({error.message for error in errors}) == 1
    for error in errors:
        assert error.is_a("WorldSizeMismatchError") and error.is_a("StateError")
        assert f"rng: 2 ranks have saved, {world} load" in error.message
        assert [tuple(entry) for entry in error.world_sizes] == [("rng", 2, world)]
    for after, without, resized in ranks(world).run(load_random, tmp_path, "fresh", config):
        assert after == without and resized == [("rng", 2, world)]
    for after, _, resized in ranks(world).run(load_random, tmp_path, "first", config):
        assert after == saved[0] and resized == [("rng", 2, world)]


def load_with_rules(path: Path, rules: list[str]) -> None:
    load_state({"rng": RankLocal(RngState(), on_resize=rules[dist.get_rank()])}, path)


def test_t52_ranks_that_declare_different_rules(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_random, tmp_path, {})
    for rules in (["fresh", "first", "fresh"], ["fresh", "error", "error"]):
        for error in ranks(3).fail(load_with_rules, tmp_path, rules):
            assert "different rules in on_resize: rng (fresh on ranks [0" in error.message


def load_without_touching(path: Path) -> tuple[Any, Any]:
    weight, own = torch.zeros(2), RankLocal({"at": -1})
    state = {"w": weight, "own": own, "rng": RankLocal(RngState())}
    before = torch.get_rng_state()
    with pytest.raises(WorldSizeMismatchError) as caught:
        load_state(state, path)
    assert torch.equal(torch.get_rng_state(), before)
    assert weight.tolist() == [0, 0] and own.value == {"at": -1}
    return str(caught.value), [tuple(entry) for entry in caught.value.world_sizes]


def save_several(path: Path) -> None:
    own = {"at": dist.get_rank()}
    save_state({"w": torch.ones(2), "own": RankLocal(own), "rng": RankLocal(RngState())}, path)


def test_t52_one_error_names_them_all_before_anything_is_touched(
    ranks: Pool, tmp_path: Path
) -> None:
    ranks(2).run(save_several, tmp_path)
    found = ranks(3).run(load_without_touching, tmp_path)
    assert len({message for message, _ in found}) == 1
    assert [sizes for _, sizes in found] == [[("own", 2, 3), ("rng", 2, 3)]] * 3


def warn_when_resized(path: Path) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dcp_pipeline")
    logger.addHandler(handler)
    try:
        load_random(path, "fresh", {})
    finally:
        logger.removeHandler(handler)
    return messages


def test_one_rank_logs_what_is_not_as_it_was(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_random, tmp_path, {})
    first, *others = ranks(3).run(warn_when_resized, tmp_path)
    assert others == [[], []]
    assert len(first) == 1
    assert "saved by 2 ranks, here are 3: every rank keeps its own rng" in first[0]
