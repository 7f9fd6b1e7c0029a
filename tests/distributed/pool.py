"""Four gloo ranks that live as long as the test session.

    def work(path):                      # at the top level of the test module
        return dist.get_rank()

    def test_it(ranks, tmp_path):
        assert ranks(2).run(work, tmp_path) == [0, 1]

Importing torch in four processes takes seconds; a call on ranks that are there, milliseconds. Each
call gets a process group of its own size, made anew. Ranks are started by the first call, and
again after a call in which one died or all had to be killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

from tests.distributed.outcome import Died, Failure

__all__ = ["CallTimeout", "Pool", "World"]

SIZE = 4
_ROOT = Path(__file__).parents[2]
_OUTPUT_BYTES = 8000
_START_SECONDS = 120.0


class CallTimeout(AssertionError):
    """A call took longer than it may; the message says what each rank was doing."""


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    connection: Connection
    log: IO[bytes]

    def output(self) -> str:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - _OUTPUT_BYTES))
        return self.log.read().decode(errors="replace")


class World:
    """The first ``size`` ranks of a pool."""

    def __init__(self, pool: Pool, size: int) -> None:
        self._pool = pool
        self.size = size

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
        """``function(*args)`` on every rank; its results, or a failed test with all tracebacks."""
        outcomes = self.outcomes(function, *args, seconds=seconds)
        failed = [
            f"--- rank {rank}: {found.trace if isinstance(found, Failure) else found}"
            for rank, found in enumerate(outcomes)
            if isinstance(found, (Failure, Died))
        ]
        if failed:
            raise AssertionError(f"{function.__name__} failed\n" + "\n".join(failed))
        return outcomes

    def outcomes(
        self, function: Callable[..., Any], *args: Any, seconds: float = 60.0
    ) -> list[Any]:
        """Per rank the result of ``function(*args)``, or a :class:`Failure`, or :class:`Died`.

        Raises:
            CallTimeout: some rank did not answer within ``seconds``; all were killed.
        """
        return self._pool.call(self.size, function, args, seconds)

    def fail(
        self, function: Callable[..., Any], *args: Any, seconds: float = 60.0
    ) -> list[Failure]:
        """The exceptions of ``function(*args)``, which has to raise on every rank."""
        outcomes = self.outcomes(function, *args, seconds=seconds)
        fine = [rank for rank, found in enumerate(outcomes) if not isinstance(found, Failure)]
        assert not fine, f"{function.__name__} did not raise on ranks {fine}: {outcomes}"
        return outcomes


class Pool:
    """The processes; see the module."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._calls = itertools.count()
        self._store: dist.TCPStore | None = None

    def __call__(self, size: int) -> World:
        assert 1 <= size <= SIZE
        return World(self, size)

    def call(
        self, size: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float
    ) -> list[Any]:
        """See :meth:`World.outcomes`."""
        self._start(size)
        message = pickle.dumps((next(self._calls), size, function, args))
        ranks = self._ranks[:size]
        for rank in ranks:
            rank.connection.send_bytes(message)
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while len(outcomes) < size:
            pending = {ranks[i].connection: i for i in range(size) if i not in outcomes}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._timeout(function, seconds, sorted(pending.values()), outcomes)
            for connection in ready:
                number = pending[connection]
                outcomes[number] = self._receive(ranks[number])
        if any(isinstance(found, Died) for found in outcomes.values()):
            self.close()
        return [outcomes[rank] for rank in range(size)]

    def _receive(self, rank: _Rank) -> Any:
        try:
            return pickle.loads(rank.connection.recv_bytes())
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(10)
            return Died(rank.process.poll(), rank.output())

    def _timeout(
        self,
        function: Callable[..., Any],
        seconds: float,
        pending: list[int],
        outcomes: dict[int, Any],
    ) -> CallTimeout:
        for rank in pending:
            self._ranks[rank].process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        stacks = "\n".join(f"--- rank {rank}:\n{self._ranks[rank].output()}" for rank in pending)
        self.close()
        answers = "\n".join(
            f"--- rank {rank} answered: {found.trace if isinstance(found, Failure) else found}"
            for rank, found in outcomes.items()
        )
        return CallTimeout(
            f"{function.__name__}: no answer of ranks {pending} in {seconds} s\n{stacks}\n{answers}"
        )

    def _start(self, size: int) -> None:
        """Start what is missing of the first ``size`` ranks."""
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        new = [self._spawn(rank, self._store.port) for rank in range(len(self._ranks), size)]
        self._ranks += new
        for rank in new:
            assert rank.connection.poll(_START_SECONDS), rank.output()
            assert rank.connection.recv_bytes() == b"ready"

    def _spawn(self, rank: int, port: int) -> _Rank:
        ours, theirs = socket.socketpair()
        log = tempfile.TemporaryFile()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.worker"]
                + [str(number) for number in (rank, theirs.fileno(), port)],
                cwd=_ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
            )
        return _Rank(process, Connection(ours.detach()), log)

    def close(self) -> None:
        """End all ranks; the next call starts them again."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
            rank.log.close()
        self._ranks = []
