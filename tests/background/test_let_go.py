"""What a save that has failed holds on to, for as long as anybody holds its future."""

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline import Pipeline
from dcp_pipeline.staging.memory import Buffer, HostMemory, SharedMemory
from tests.background.pipelines import MOSTLY_THREAD, troubled_pipeline


@pytest.fixture
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def _buffers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """The memory behind each buffer that is allocated."""
    made: list[weakref.ref[Any]] = []
    for memory in (HostMemory, SharedMemory):
        real = memory.allocate

        def allocate(self: Any, nbytes: int, real: Callable[..., Buffer] = real) -> Buffer:
            buffer = real(self, nbytes)
            made.append(weakref.ref(buffer.data.untyped_storage()))
            return buffer

        monkeypatch.setattr(memory, "allocate", allocate)
    return made


@pytest.mark.usefixtures("_without_collections")
@pytest.mark.parametrize("background", MOSTLY_THREAD)
@pytest.mark.parametrize("times", [0, 1, 2])
def test_buffers_go_when_a_pipeline_is_closed(
    tmp_path: Path, _buffers: list[weakref.ref[Any]], background: str, times: int
) -> None:
    with troubled_pipeline(background, tmp_path, times=times) as pipeline:
        savings = []
        for number in range(3):
            saving = pipeline.async_save({"w": torch.ones(9)}, tmp_path / str(number))
            failed = saving.exception(60) is not None
            savings.append(saving)
            assert failed == (number < times)
    assert _buffers
    assert [buffer() for buffer in _buffers] == [None] * len(_buffers)


class State:
    """Asked for its state, it fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


class Stager:
    """In DCP's terms; fails at once, or in its future."""

    should_synchronize_after_execute = False

    def __init__(self, in_future: bool) -> None:
        self._in_future = in_future

    def stage(self, state_dict: dict[str, Any]) -> Any:
        if not self._in_future:
            raise ValueError("staging")
        future: Future[Any] = Future()
        future.set_result({"w": object})  # what cannot be stored
        return future

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.usefixtures("_without_collections")
@pytest.mark.parametrize("how", ["state", "stage", "staged"])
def test_a_state_is_let_go(tmp_path: Path, how: str) -> None:
    tensor = torch.ones(9)
    known = weakref.ref(tensor.untyped_storage())
    state: dict[str, Any] = {"w": tensor}
    with Pipeline() as pipeline:
        errors: list[BaseException] = []
        try:
            if how == "state":
                state["bad"] = State(ValueError("mine"))
                pipeline.async_save(state, tmp_path)
            else:
                stager: Any = Stager(how == "staged")
                saving = pipeline.async_save(state, tmp_path, async_stager=stager)
                saving.upload_completion.result(60)
        except Exception as error:
            errors.append(error.with_traceback(None))
        assert errors
        state.clear()
        del tensor
    assert known() is None
