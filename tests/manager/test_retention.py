"""The policy, as a pure function: what goes, and what never does."""

import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dcp_pipeline.manager.retention import Retention, StepRecord

SCORES = st.none() | st.floats() | st.integers(-3, 3).map(float)
RECORDS = st.lists(
    st.builds(
        StepRecord,
        step=st.integers(0, 60),
        score=SCORES,
        is_whole=st.booleans(),
        is_pinned=st.booleans(),
        is_being_saved=st.booleans(),
        is_foreign=st.booleans(),
    ),
    unique_by=lambda record: record.step,
)
MODES = st.sampled_from(["min", "max"])
COUNT = st.none() | st.integers(1, 5)
POLICIES = st.builds(
    Retention, keep_last=COUNT, keep_every=COUNT, keep_best=COUNT, mode=MODES
)  # fmt: skip


def of(steps: Any, **values: Any) -> list[StepRecord]:
    return [StepRecord(step, **values) for step in steps]


@given(RECORDS, POLICIES, st.sets(st.integers(0, 60)))
def test_what_never_goes(records: list[StepRecord], policy: Retention, protected: set[int]) -> None:
    removed = policy.removable(records, protected)
    by_step = {record.step: record for record in records}
    for step in removed:
        record = by_step[step]
        assert not (record.is_pinned or record.is_being_saved or record.is_foreign)
        assert step not in protected
        assert not policy.keep_every or step % policy.keep_every
    whole = [r.step for r in records if r.is_whole and not r.is_foreign]
    left = [step for step in whole if step not in removed]
    if removed:
        assert policy.keep_last is not None and len(left) >= policy.keep_last
        # The newest whole steps stay, and with them everything that is newer than they are.
        assert set(sorted(whole)[-policy.keep_last :]) <= set(left)
        assert max(removed) < sorted(whole)[-policy.keep_last]


@given(RECORDS, POLICIES)
def test_doing_it_again_changes_nothing(records: list[StepRecord], policy: Retention) -> None:
    removed = policy.removable(records)
    assert policy.removable([r for r in records if r.step not in removed]) == set()


@given(RECORDS, POLICIES, st.integers(1, 5))
def test_who_keeps_more_removes_less(
    records: list[StepRecord], policy: Retention, last: int
) -> None:
    less = Retention(last, policy.keep_every, policy.keep_best, policy.mode)
    more = Retention(last + 1, policy.keep_every, policy.keep_best, policy.mode)
    assert more.removable(records) <= less.removable(records)
    assert Retention().removable(records) == set()


@given(RECORDS, st.integers(1, 5))
def test_the_best_are_finite_and_the_newest_of_equals(records: list[StepRecord], best: int) -> None:
    records = [StepRecord(r.step, r.score) for r in records] + of([99])
    kept = {r.step for r in records} - Retention(1, None, best, "max").removable(records) - {99}
    finite = [r for r in records if r.score is not None and math.isfinite(r.score)]
    expected = sorted(finite, key=lambda r: (r.score, r.step))[-best:]
    assert kept == {r.step for r in expected}


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (Retention(), list(range(10, 260, 10))),
        (Retention(1), [250]),
        (Retention(2, 100), [100, 200, 240, 250]),
        (Retention(100), list(range(10, 260, 10))),
    ],
)
def test_t12(policy: Retention, left: list[int]) -> None:
    records = of(range(10, 260, 10))
    removed = policy.removable(records)
    assert [r.step for r in records if r.step not in removed] == left


def test_a_damaged_step_does_not_take_the_place_of_a_whole_one() -> None:
    records = [*of([10, 20]), *of([30], is_whole=False)]
    assert Retention(1).removable(records) == {10}
    assert Retention(2).removable(records) == set()
    assert Retention(1).removable([*records, *of([40])]) == {10, 20, 30}


def test_nothing_goes_while_nothing_is_whole() -> None:
    assert Retention(1).removable(of([10, 20, 30], is_whole=False)) == set()


def test_nan_is_never_best() -> None:
    records = [StepRecord(1, 5.0), StepRecord(2, math.nan), StepRecord(3, -math.inf), StepRecord(4)]
    assert Retention(1, None, 1, "min").removable(records) == {2, 3}
