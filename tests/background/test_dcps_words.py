"""``async_save`` with DCP's signature and stagers, and what does not go together."""

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    ConfigError,
    GraphError,
    Node,
    Pipeline,
    PipelineConfig,
)
from tests.background.pipelines import pipeline_of, troubled_pipeline


def test_the_function_of_dcps_signature(tmp_path: Path) -> None:
    for kind in AsyncCheckpointerType:
        state = {"w": torch.ones(4)}
        saving = dcp_pipeline.async_save(
            state, checkpoint_id=tmp_path / kind.value, async_checkpointer_type=kind
        )
        state["w"].zero_()
        assert isinstance(saving, Future)
        assert isinstance(saving.result(), dcp_pipeline.Metadata)
        assert dcp_pipeline.load_keys(tmp_path / kind.value)["w"].tolist() == [1] * 4


class Counting:
    """An AsyncStager of a user."""

    def __init__(self, in_future: bool = False) -> None:
        self.calls: list[str] = []
        self._in_future = in_future
        self.future: Future[Any] = Future()

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def stage(self, state_dict: dict[str, Any]) -> Any:
        self.calls.append("stage")
        copied = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in state_dict.items()
        }
        if not self._in_future:
            return copied
        threading.Timer(0.2, self.future.set_result, [copied]).start()
        return self.future

    def synchronize_staging(self) -> None:
        self.calls.append("synchronize")

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("in_future", [False, True])
def test_a_stager_of_a_user(tmp_path: Path, in_future: bool) -> None:
    stager, state = Counting(in_future), {"w": torch.ones(4), "n": 3}
    with Pipeline() as pipeline:
        saving = pipeline.async_save(state, tmp_path, async_stager=stager)
        if in_future:
            assert isinstance(saving, AsyncSaveResponse)
            assert saving.staging_completion.result() is None
            saving = saving.upload_completion
        state["w"].zero_()
        assert isinstance(saving, Future)
        saving.result()
    assert stager.calls == ["stage"] if in_future else ["stage", "synchronize"]
    assert dcp_pipeline.load_keys(tmp_path)["w"].tolist() == [1] * 4


class Late(Counting):
    """As the other, with a future of its own for every call."""

    def stage(self, state_dict: dict[str, Any]) -> Any:
        future: Future[Any] = Future()
        future.set_result(super().stage(state_dict))
        return future


@pytest.mark.parametrize(
    ("stager", "own", "is_later"),
    [
        ("host", None, False),
        ({"kind": "pinned", "overlap": True}, None, True),
        ("inplace", Counting(), False),
        ("inplace", Late(), True),
    ],
)
def test_what_is_left_out_is_of_the_type_of_what_is_not(
    tmp_path: Path, stager: Any, own: Any, is_later: bool
) -> None:
    gate = tmp_path / "gate"
    with troubled_pipeline(
        "thread", tmp_path, gate=str(gate), when_full="skip", stager=stager
    ) as pipeline:
        made, left_out = (
            pipeline.async_save({"w": torch.ones(4)}, tmp_path / name, async_stager=own)
            for name in ("a", "b")
        )
        gate.touch()
        assert isinstance(made, AsyncSaveResponse) == is_later
        if is_later:
            assert isinstance(left_out, AsyncSaveResponse)
            assert left_out.staging_completion.result(0) is None
            left_out = left_out.upload_completion
        assert isinstance(left_out, Future) and left_out.result(0) is None
    assert (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_torchs_stager_and_their_planner_and_writer(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "n": 3}
    stager = dcp_pipeline.DefaultStager(dcp_pipeline.StagingOptions(False, False, False, False))
    savings = [
        dcp_pipeline.async_save(state, checkpoint_id=tmp_path / "0", async_stager=stager),
        dcp_pipeline.async_save(
            state, checkpoint_id=tmp_path / "1", planner=dcp.DefaultSavePlanner()
        ),
        dcp_pipeline.async_save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "2")),
        dcp_pipeline.async_save(state, checkpoint_id=tmp_path / "3", use_collectives=False),
    ]
    state["w"].zero_()
    for saving in savings:
        assert isinstance(saving, Future)
        saving.result()
    for number in range(4):
        loaded = {"w": torch.zeros(4), "n": 0}
        dcp_pipeline.load(loaded, checkpoint_id=tmp_path / str(number))
        assert loaded["w"].tolist() == [1] * 4 and loaded["n"] == 3
    stager.close()


@pytest.mark.slow
def test_a_stager_of_a_user_and_a_process(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "n": 3}
    with pipeline_of("process") as pipeline:
        saving = pipeline.async_save(state, tmp_path, async_stager=Counting())
        state["w"].zero_()
        assert isinstance(saving, Future)
        saving.result()
    assert dcp_pipeline.load_keys(tmp_path)["w"].tolist() == [1] * 4


def test_a_planner_of_dcps_and_a_process_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save in a thread"):
        dcp_pipeline.async_save(
            {},
            checkpoint_id=tmp_path,
            planner=dcp.DefaultSavePlanner(),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )


# What cannot be


def test_combinations_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="stager"):
        Pipeline.from_config({"background": "process", "stager": "host"})
    with pytest.raises(ConfigError, match="background"):
        Pipeline.from_config({"background": "process", "storage": "memory"})


def late(entries: object) -> None:
    raise AssertionError


def late_value(staged: object) -> None:
    return None


def test_a_node_behind_the_snapshot_cannot_look_at_the_live_state(tmp_path: Path) -> None:
    node = Node("late", late, ("entries", "manifest"), ())
    with pytest.raises(GraphError, match="'late' needs 'entries'"):
        Pipeline(save_nodes=[node]).async_save({}, tmp_path)


def test_a_node_of_a_user_runs_in_the_background(tmp_path: Path, background: str) -> None:
    node = Node("late", late_value, ("staged",), ("seen",))
    pipeline = Pipeline(PipelineConfig(background=background), save_nodes=[node])
    with pipeline:
        result = pipeline.async_save({"w": torch.ones(2)}, tmp_path).result()
        assert result.trace["late"].seconds >= 0


def test_what_cannot_be_sent_to_a_process_is_named(tmp_path: Path) -> None:
    node = Node("local", lambda staged: None, ("staged",), ("seen",))
    with Pipeline(PipelineConfig(background="process"), save_nodes=[node]) as pipeline:
        with pytest.raises(ConfigError, match="importable by their names"):
            pipeline.async_save({"w": torch.ones(2)}, tmp_path).result()
