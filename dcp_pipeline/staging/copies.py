"""Copies from the caller's tensors into host memory, on streams of their own where there is one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Copies", "Streams"]


class Streams:
    """The streams of devices; tests hand in others."""

    def current(self, device: torch.device) -> Any:
        """The stream on which the caller's work for ``device`` is queued."""
        return torch.accelerator.current_stream(device)

    def side(self, device: torch.device) -> Any:
        """A further stream of ``device``, to be entered with ``with``."""
        return torch.Stream(device)


class Copies:
    """Copies tensors in one go, and says when they are there.

    Copies from a device are queued on a side stream behind what the caller has queued so far.

    Args:
        overlaps: let the caller's later work on the device run beside the copies. It must not
            change the tensors before :meth:`start`'s events are done; otherwise it waits for them
            on the device, and the processor does not.
        streams: of the devices.
    """

    def __init__(self, overlaps: bool = False, streams: Streams | None = None) -> None:
        self.overlaps = overlaps
        self._streams = streams or Streams()
        self._sides: dict[torch.device, Any] = {}

    def start(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> list[Any]:
        """Copy each source to its target, which lies in host memory and has its shape and dtype.

        Returns:
            Events, each of which has ``synchronize()``; the targets hold the values once all are
            done. The sources must live until then. None for sources in host memory.
        """
        pairs: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]]
        pairs = defaultdict(lambda: ([], []))
        for target, source in zip(targets, sources, strict=True):
            of_device = pairs[source.device]
            of_device[0].append(target)
            of_device[1].append(source)
        events = [
            self._queue(device, *pair) for device, pair in pairs.items() if device.type != "cpu"
        ]
        for device, pair in pairs.items():
            if device.type == "cpu":
                _copy(*pair, non_blocking=False)
        return events

    def _queue(
        self, device: torch.device, targets: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> Any:
        current = self._streams.current(device)
        side = self._sides.setdefault(device, None) or self._streams.side(device)
        self._sides[device] = side
        side.wait_stream(current)
        with side:
            _copy(targets, sources, non_blocking=True)
        event = side.record_event()
        if not self.overlaps:
            # What the caller queues from now on may change the sources.
            current.wait_event(event)
        return event


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool) -> None:
    with torch.no_grad():
        # The loop over tensors runs in C++: with many small ones it is most of the time.
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)
