"""Snapshots: what is copied when, which memory is used again, and the streams of a device."""

from typing import Any

import pytest
import torch

from dcp_pipeline.core.table import Kind
from dcp_pipeline.staging import copies
from dcp_pipeline.staging.arena import ArenaStager
from dcp_pipeline.staging.copies import Copies, Streams
from dcp_pipeline.staging.host import HostStager, PinnedStager, SharedStager
from dcp_pipeline.staging.memory import HostMemory
from dcp_pipeline.types.dtypes import DTYPES
from dcp_pipeline.types.entries import Entries, Entry, Piece
from tests.equal import bits

STAGERS = [HostStager, PinnedStager, SharedStager]


def entries_of(*tensors: torch.Tensor) -> Entries:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return Entries(
        Entry(
            (f"t{number}",),
            Kind.TENSOR,
            names[tensor.dtype],
            tuple(tensor.shape),
            (Piece((0,) * tensor.dim(), tuple(tensor.shape), tensor),),
        )
        for number, tensor in enumerate(tensors)
    )


def random_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 255, (3, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("make", STAGERS)
def test_every_dtype(make: type[ArenaStager]) -> None:
    stager = make()
    tensors = [random_of(dtype) for dtype in DTYPES.values() if dtype is not torch.bool]
    tensors += [torch.tensor([True, False]), torch.tensor(3.0), torch.zeros(0, 4)]
    staged = stager.stage(entries_of(*tensors))
    staged.wait()
    for entry, tensor in zip(staged, tensors, strict=True):
        (piece,) = entry.pieces
        assert piece.data.dtype == tensor.dtype and piece.data.shape == tensor.shape
        assert torch.equal(bits(piece.data), bits(tensor))
        assert not tensor.numel() or piece.data.data_ptr() != tensor.data_ptr()
    stager.release(staged)
    stager.close()
    assert stager.nbytes == 0


def test_views_are_copied_as_they_read() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    views = [base.t(), base[::2, 1:4], base.expand(2, 4, 6), torch.tensor([1 + 2j]).conj()]
    staged = HostStager().stage(entries_of(*views))
    for entry, view in zip(staged, views, strict=True):
        data = entry.pieces[0].data
        assert data.is_contiguous() and torch.equal(data, view.resolve_conj())


def test_a_tied_tensor_is_copied_once() -> None:
    entries = entries_of(torch.ones(1000), torch.ones(1000))
    first, second = entries
    tied = Entries([first, Entry(("t1",), Kind.TENSOR, "float32", (1000,), first.pieces, alias=0)])
    stager = HostStager()
    staged = stager.stage(tied)
    assert staged[1].pieces == staged[0].pieces and 4000 <= stager.nbytes < 4100
    assert staged[1].alias == 0 and second.alias == -1


@pytest.mark.parametrize("make", STAGERS)
def test_a_buffer_is_used_again_once_it_is_released(make: type[ArenaStager]) -> None:
    stager, tensor = make(), torch.ones(1000)
    first = stager.stage(entries_of(tensor))
    second = stager.stage(entries_of(tensor * 2))
    places = [staged[0].pieces[0].data.data_ptr() for staged in (first, second)]
    assert places[0] != places[1] and float(first[0].pieces[0].data[0]) == 1
    stager.release(first)
    third = stager.stage(entries_of(tensor * 3))
    assert third[0].pieces[0].data.data_ptr() == places[0]
    stager.release(second)
    stager.release(third)
    for size in (10, 1000, 999, 1):
        staged = stager.stage(entries_of(torch.ones(size)))
        assert stager.nbytes < 2 * 4100
        stager.release(staged)
    grown = stager.stage(entries_of(torch.ones(5000)))
    assert stager.nbytes < 20_100 + 4100
    stager.close()
    assert bool((grown[0].pieces[0].data == 1).all())
    stager.release(grown)
    assert stager.nbytes == 0


def test_another_form_in_the_same_buffer() -> None:
    stager = HostStager()
    for tensors in ([torch.ones(4), torch.zeros(8)], [torch.arange(3)], [torch.ones(12)]):
        staged = stager.stage(entries_of(*tensors))
        for entry, tensor in zip(staged, tensors, strict=True):
            assert torch.equal(entry.pieces[0].data, tensor)
        stager.release(staged)


def test_reserved_buffers_fit() -> None:
    stager, entries = HostStager(), entries_of(torch.ones(7), torch.ones(9))
    stager.reserve_for(entries, 2)
    reserved = stager.nbytes
    staged = [stager.stage(entries), stager.stage(entries)]
    assert stager.nbytes == reserved
    for snapshot in staged:
        stager.release(snapshot)


def test_releasing_twice_does_no_harm() -> None:
    stager = HostStager()
    staged = stager.stage(entries_of(torch.ones(3)))
    stager.release(staged)
    stager.release(staged)
    stager.release(Entries())
    first, second = (stager.stage(entries_of(torch.ones(3))) for _ in range(2))
    assert first[0].pieces[0].data.data_ptr() != second[0].pieces[0].data.data_ptr()


def test_memory_that_runs_out_leaves_the_buffers_free() -> None:
    class Failing(Copies):
        def start(self, targets: Any, sources: Any) -> list[Any]:
            raise RuntimeError("out of memory")

    stager = ArenaStager(HostMemory(), Failing())
    for _ in range(2):
        with pytest.raises(RuntimeError):
            stager.stage(entries_of(torch.ones(3)))
    assert stager.nbytes <= 64
    stager.close()
    assert stager.nbytes == 0


# The streams of a device, of which there is none here: what is asked of them, in which order.


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "FakeStream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for the event of {event.stream.name}")

    def record_event(self) -> "FakeEvent":
        self.log.append(f"{self.name} records")
        return FakeEvent(self)

    def __enter__(self) -> None:
        self.log.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"leave {self.name}")


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.log.append(f"wait for {self.stream.name}")


class FakeStreams(Streams):
    def __init__(self) -> None:
        self.log: list[str] = []
        self.sides = 0

    def current(self, device: torch.device) -> FakeStream:
        return FakeStream("training", self.log)

    def side(self, device: torch.device) -> FakeStream:
        self.sides += 1
        return FakeStream("side", self.log)


class OnDevice:
    """A tensor that says it is on a device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.device = torch.device("cuda:0")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    made: list[tuple[int, bool]] = []

    def copy(targets: list[Any], sources: list[Any], non_blocking: bool) -> None:
        made.append((len(targets), non_blocking))
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.tensor if isinstance(source, OnDevice) else source)

    monkeypatch.setattr(copies, "_copy", copy)
    return made


QUEUED = ["side waits for training", "enter side", "leave side", "side records"]


def test_copies_queue_behind_the_training_which_waits_for_them(
    copied: list[tuple[int, bool]],
) -> None:
    streams = FakeStreams()
    maker = Copies(streams=streams)
    targets = [torch.zeros(2) for _ in range(3)]
    sources: list[Any] = [OnDevice(torch.ones(2)), torch.full((2,), 5.0), OnDevice(torch.ones(2))]
    (event,) = maker.start(targets, sources)
    assert streams.log == [*QUEUED, "training waits for the event of side"]
    # Those of the device first, and without waiting; those of the host are there at once.
    assert copied == [(2, True), (1, False)]
    assert [float(target[0]) for target in targets] == [1, 5, 1]
    event.synchronize()
    assert streams.log[-1] == "wait for side"
    maker.start(targets, sources)
    assert streams.sides == 1


def test_with_overlap_the_training_does_not_wait(copied: list[tuple[int, bool]]) -> None:
    streams = FakeStreams()
    Copies(overlaps=True, streams=streams).start([torch.zeros(2)], [OnDevice(torch.ones(2))])  # type: ignore[list-item]
    assert streams.log == QUEUED


def test_host_tensors_ask_nothing_of_a_device() -> None:
    streams = FakeStreams()
    target = torch.zeros(2)
    assert Copies(streams=streams).start([target], [torch.ones(2)]) == []
    assert streams.log == [] and float(target[0]) == 1
