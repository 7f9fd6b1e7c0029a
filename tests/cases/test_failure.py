"""Failure propagation: T16, T17, and U01, U13 of the counted faults."""

import errno
import io
import os
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_pipeline.core.errors import StorageError
from dcp_pipeline.graph.node import Node
from dcp_pipeline.pipeline import Pipeline
from tests.cases.jobs import files, load, pipeline_of, save, save_state, state_with, values_of
from tests.distributed.pool import Pool
from tests.equal import assert_same
from tests.marks import mostly_slow, slow

CODES = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EROFS]


METHODS = ["create", "reserve", "write", "sync"]


@pytest.mark.parametrize(
    ("method", "code"),
    mostly_slow(
        product(METHODS, CODES),
        [(method, errno.EIO) for method in METHODS] + [("write", code) for code in CODES],
    ),
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value,
)
def test_t16_every_rank_names_the_rank_and_the_systems_error(
    ranks: Pool, tmp_path: Path, code: int, method: str
) -> None:
    fault = {"kind": "faulty", "method": method, "names": "*.distcp", "code": code, "on_rank": 1}
    for failure in ranks(2).fail(save, tmp_path / "new", 1.0, {"storage": fault}):
        assert failure.is_a("StorageError") and failure.is_a("OSError")
        assert failure.errno == code and failure.filename.endswith(".distcp")
        assert errno.errorcode[code] in failure.message and "rank 1" in failure.message
        assert os.strerror(code) in failure.message and "free" in failure.message
        assert failure.failures.keys() == {1}
        assert failure.node == "write"
    assert files(tmp_path / "new") == []


def test_t16_two_ranks_that_fail_differently_are_both_named(ranks: Pool, tmp_path: Path) -> None:
    for failure in ranks(3).fail(fail_by_rank, tmp_path):
        assert failure.failures == {0: ("KeyError", "'zero'"), 2: ("LookupError", "two")}
        assert "rank 0" in failure.message and "rank 2" in failure.message
    assert files(tmp_path) == []


class Raising:
    """A ``Stateful`` that raises on some ranks."""

    def __init__(self, errors: dict[int, BaseException], then_sleep: float = 0.0) -> None:
        self._errors = errors
        self._then_sleep = then_sleep

    def state_dict(self) -> dict[str, Any]:
        error = self._errors.get(dist.get_rank())
        if error is not None:
            raise error
        return {"weight": torch.ones(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state_dict()


def fail_by_rank(path: Path) -> None:
    with pipeline_of() as pipeline:
        pipeline.save({"a": Raising({0: KeyError("zero"), 2: LookupError("two")})}, path)


class CustomError(Exception):
    """Of a type that other ranks do not know."""


def raise_and_sleep(path: Path, seconds: float, after: str) -> str:
    """Rank 1 fails and then does something else for long; how long every rank waited."""
    errors = {1: ValueError("the state is torn") if after == "built-in" else CustomError("torn")}
    started = time.monotonic()
    try:
        with pipeline_of() as pipeline:
            pipeline.save({"a": Raising(errors)}, path)
    except Exception as error:
        waited = time.monotonic() - started
        if dist.get_rank() == 1:
            time.sleep(seconds)
        return f"{type(error).__name__} {waited < 5} {error}"
    return "did not raise"


@pytest.mark.parametrize("kind", [slow("built-in"), "custom"])
def test_t17_a_state_dict_that_raises_reaches_all_ranks_at_once(
    ranks: Pool, tmp_path: Path, kind: str
) -> None:
    for rank, said in enumerate(ranks(2).run(raise_and_sleep, tmp_path, 3.0, kind)):
        assert "True" in said and "torn" in said and "rank 1" in said
        known = {"built-in": "ValueError", "custom": "RemoteError" if rank == 0 else "CustomError"}
        assert said.startswith(known[kind])
    assert files(tmp_path) == []


def fail_in_node(path: Path, node: str, graph: str) -> None:
    """A user's node fails on rank 1, whatever it hangs behind."""

    def act(**values: Any) -> None:
        if dist.get_rank() == 1:
            raise StorageError("a node of mine has failed", "somewhere", errno.EXDEV)

    mine = Node("mine", act, (node,))
    nodes = {f"{graph}_nodes": [mine]}
    pipeline = Pipeline(pipeline_of().config, **nodes)
    if graph == "save":
        pipeline.save(state_with(2.0), path)
    else:
        state = state_with(-1.0)
        try:
            pipeline.load(state, path)
        finally:
            assert values_of(state) == {-1.0}


@pytest.mark.parametrize(
    ("node", "graph"),
    [
        slow("entries", "save"),
        slow("staged", "save"),
        ("local_plan", "save"),
        slow("share", "save"),
        ("receipt", "save"),
        slow("template", "load"),
        slow("manifest", "load"),
        ("match", "load"),
        slow("differences", "load"),
        ("fetched", "load"),
    ],
)
def test_a_users_node_that_fails_on_one_rank_fails_on_all(
    ranks: Pool, tmp_path: Path, node: str, graph: str
) -> None:
    ranks(2).run(save, tmp_path, 1.0)
    before = files(tmp_path)
    for failure in ranks(2).fail(fail_in_node, tmp_path, node, graph):
        assert failure.is_a("StorageError") and failure.errno == errno.EXDEV
        assert failure.node == "mine" and failure.failures.keys() == {1}
        assert "a node of mine has failed" in failure.message
    assert files(tmp_path) == before
    assert ranks(2).run(load, tmp_path) == [{1.0}, {1.0}]


FILES = ["__0_0.*", "__0_1.*", "__1_0.*", "__1_1.*"]


@pytest.mark.parametrize(
    ("method", "file"),
    mostly_slow(
        product(["write", "reserve", "close"], FILES),
        [("write", FILES[0]), ("write", FILES[3]), ("reserve", FILES[2]), ("close", FILES[1])],
    ),
)
def test_u01_one_of_two_writer_threads_fails(
    ranks: Pool, tmp_path: Path, file: str, method: str
) -> None:
    fault = {"kind": "faulty", "method": method, "names": file, "code": errno.EIO}
    state = {f"w{i}": torch.full((1 << 20,), float(i)) for i in range(4)}
    config = {"storage": fault, "planner": {"dedup": "balanced", "split_bytes": "1GiB"}}
    for failure in ranks(2).fail(save_state, state, tmp_path / "new", config):
        assert failure.errno == errno.EIO
        assert list(failure.failures) == [int(file[2])]
        assert "PeerFailedError" not in failure.message
    assert files(tmp_path / "new") == []
    for failure in ranks(2).fail(load, tmp_path / "new"):
        assert failure.is_a("CheckpointNotFoundError")


# Loading: what has changed on any rank is put back on all of them.


class Counter:
    """A ``Stateful`` that remembers what it was given."""

    def __init__(self, value: int) -> None:
        self.value = {"count": value, "seen": [value]}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = {"count": state_dict["count"], "seen": list(state_dict["seen"])}


def rich_state(value: float) -> dict[str, Any]:
    """Tensors, containers, values, objects; many, so that some are read before others."""
    state = state_with(value)
    state |= {f"w{i}": torch.full((1 << 14,), value) for i in range(8)}
    state |= {
        "list": [torch.full((2,), value), value, {"deep": value}],
        "pair": (torch.full((2,), value), "text"),
        "object": Counter(int(value)),
        "stream": io.BytesIO(str(value).encode()),
    }
    return state


def save_rich(path: Path, config: dict[str, Any]) -> None:
    with pipeline_of(config) as pipeline:
        pipeline.save(rich_state(1.0), path)


def plain(state: Any) -> Any:
    """A copy that can be compared."""
    if isinstance(state, Counter):
        return plain(state.value)
    if isinstance(state, io.BytesIO):
        return state.getvalue()
    if isinstance(state, torch.Tensor):
        local = state.to_local() if hasattr(state, "to_local") else state
        return local.detach().clone()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(plain(value) for value in state)
    return state


def load_damaged(path: Path, config: dict[str, Any]) -> str:
    """Load what is damaged; every rank raises, and has what it had."""
    state = rich_state(-1.0)
    before, object_, tensors = plain(state), state["object"], {k: id(v) for k, v in state.items()}
    with pipeline_of(config) as pipeline:
        try:
            pipeline.load(state, path)
        except Exception as error:
            assert_same(plain(state), before)
            assert state["object"] is object_
            assert {k: id(v) for k, v in state.items()} == tensors
            return f"{[base.__name__ for base in type(error).__mro__]} {error}"
    return "did not raise"


def damage(path: Path, how: str) -> None:
    """Damage the largest data file of rank 1."""
    file = max(path.glob("__1_*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    if how == "gone":
        file.unlink()
        return
    if how == "cut off":
        data = data[:-1000]
    elif how == "emptied":
        data = bytearray()
    elif how == "appended to":
        data += b"\0"
    else:
        data[len(data) // 2] ^= 1
    file.write_bytes(data)


ERRORS = {
    "gone": "MissingFileError",
    "cut off": "CorruptCheckpointError",
    "emptied": "CorruptCheckpointError",
    "appended to": "CorruptCheckpointError",
    "flipped": "ChecksumError",
}


@pytest.mark.parametrize(
    ("rollback", "how"),
    mostly_slow(
        product(["copy", "verify_first"], ERRORS),
        [
            ("copy", "gone"),
            ("copy", "cut off"),
            ("copy", "flipped"),
            ("verify_first", "emptied"),
            ("verify_first", "appended to"),
            ("verify_first", "flipped"),
        ],
    ),
)
def test_u13_a_load_that_fails_changes_nothing_on_any_rank(
    ranks: Pool, tmp_path: Path, how: str, rollback: str
) -> None:
    config = {"rollback": rollback, "layout": {"block_bytes": "4KiB"}}
    ranks(2).run(save_rich, tmp_path, config)
    damage(tmp_path, how)
    for said in ranks(2).run(load_damaged, tmp_path, config):
        assert ERRORS[how] in said and "CheckpointException" in said
        assert "__1_" in said


class Refusing(Counter):
    """A ``Stateful`` that refuses what it is given on one rank, once."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 1 and state_dict["count"] == 1:
            raise RuntimeError("I refuse")
        super().load_state_dict(state_dict)


def load_refused(path: Path) -> str:
    state = rich_state(-1.0)
    state["object"] = Refusing(-1)
    before = plain(state)
    with pipeline_of() as pipeline:
        try:
            pipeline.load(state, path)
        except Exception as error:
            assert_same(plain(state) | {"object": state["object"].value}, before | {
                "object": {"count": -1, "seen": [-1]}})  # fmt: skip
            return f"{type(error).__name__} {error}"
    return "did not raise"


def test_u13_an_object_that_refuses_its_state_on_one_rank(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_rich, tmp_path, {})
    for said in ranks(2).run(load_refused, tmp_path):
        assert said.startswith("RuntimeError") and "I refuse" in said and "rank 1" in said


class Torn(Counter):
    """A ``Stateful`` that cannot be put back either."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("I always refuse")


def load_torn(path: Path) -> str:
    state = rich_state(-1.0)
    if dist.get_rank() == 1:
        state["object"] = Torn(-1)
    with pipeline_of() as pipeline:
        try:
            pipeline.load(state, path)
        except Exception as error:
            return f"{type(error).__name__} {error}"
    return "did not raise"


def test_a_rollback_that_fails_says_what_is_left_changed(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(save_rich, tmp_path, {})
    for said in ranks(2).run(load_torn, tmp_path):
        assert said.startswith("RollbackFailedError") and "object" in said and "rank 1" in said
