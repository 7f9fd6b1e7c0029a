"""A process beside this one that answers requests, and is noticed when it dies."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing import connection, reduction
from typing import Any

from dcp_pipeline.background.priority import lower_priority
from dcp_pipeline.core.errors import BackgroundDiedError, ConfigError

__all__ = ["Answer", "Worker"]

logger = logging.getLogger("dcp_pipeline")

Answer = Callable[[Any, int], Any]
"""What a worker runs: a request and a file descriptor (-1 for none) to its answer."""

_GRACE_SECONDS = 5.0
_OF_GROUPS = (signal.SIGINT, signal.SIGTERM)
"""What shells and schedulers send to all processes of a job."""


class Worker:
    """A spawned process with an object that answers requests, one at a time.

    It ignores SIGINT and SIGTERM, which a shell or a scheduler sends to whole groups: this process
    decides when it ends. It ends by itself when this process is gone.

    Args:
        target: called in the process with ``arguments``; what it returns answers requests. Found
            there by its module and name.
        arguments: pickled.
        start_timeout: seconds until the process has to be up.
        nice, io_priority: see :func:`lower_priority`.

    Raises:
        ConfigError: the arguments cannot be sent.
    """

    def __init__(
        self,
        target: Callable[..., Answer],
        arguments: tuple[Any, ...],
        start_timeout: float,
        nice: int = 0,
        io_priority: str | None = None,
    ) -> None:
        try:
            setup = pickle.dumps((target, arguments))
        except Exception as error:
            raise ConfigError(
                f"a background process cannot be given what it needs: {error}. Classes and"
                " functions have to be importable by their names",
                "background",
            ) from error
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, setup, nice, io_priority),
            name="dcp_pipeline background",
            daemon=True,
        )
        self._is_closing = False
        self._joining = threading.Lock()
        # multiprocessing would ask it to end by a signal that it does not heed, and wait for it.
        atexit.register(self.kill)
        with _outside_of_launcher(), _deaf():
            self._process.start()
        theirs.close()
        self.pid = self._process.pid
        self._start_timeout = start_timeout

    def wait_until_up(self) -> None:
        """Until it answers requests.

        Raises:
            BackgroundDiedError: it ended, or did not come up in time.
        """
        try:
            self._receive("start", self._start_timeout)
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._watch, name="dcp_pipeline watch", daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """How it ended, ``None`` while it lives; negative for a signal."""
        return self._process.exitcode

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        self._join(_GRACE_SECONDS)
        return _ending(self.exit_code)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return not connection.wait([self._process.sentinel], 0)

    def request(self, request: Any, descriptor: int = -1, timeout: float | None = None) -> Any:
        """Its answer.

        Args:
            request: pickled.
            descriptor: an open file to pass on.
            timeout: seconds, ``None`` for none.

        Raises:
            BackgroundDiedError: it ended, or did not answer in time.
            Exception: what the request raised there, as it arrived.
        """
        try:
            data = pickle.dumps((request, descriptor >= 0))
        except Exception as error:
            raise ConfigError(
                f"a background process cannot be sent this: {error}", "background"
            ) from error
        try:
            self._connection.send_bytes(data)
            if descriptor >= 0:
                assert self.pid is not None
                reduction.send_handle(self._connection, descriptor, self.pid)
        except (OSError, EOFError) as error:
            raise self._died("request") from error
        return self._receive("answer", timeout)

    def _receive(self, what: str, timeout: float | None) -> Any:
        try:
            ready = connection.wait([self._connection, self._process.sentinel], timeout)
        except (OSError, ValueError) as error:  # it was ended here meanwhile
            raise self._died(what) from error
        if self._connection in ready:
            try:
                is_fine, answer = pickle.loads(self._connection.recv_bytes())
            except (OSError, EOFError) as error:
                raise self._died(what) from error
            if is_fine:
                return answer
            raise answer
        if ready:
            raise self._died(what)
        raise BackgroundDiedError(
            f"the background process {self.pid} did not {what} within {timeout:g} s"
        )

    def _died(self, what: str) -> BackgroundDiedError:
        text = f"the background process {self.pid} died, {self.ending}"
        return BackgroundDiedError(text, exit_code=self.exit_code)

    def _join(self, timeout: float) -> None:
        # Of two threads that wait for the same process, one would never learn how it has ended.
        with self._joining:
            self._process.join(timeout)

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection.wait([self._process.sentinel])
            if not self._is_closing:
                logger.error("the background process %s died, %s", self.pid, self.ending)

    def close(self, timeout: float = _GRACE_SECONDS) -> None:
        """End it; it is killed if it does not within ``timeout`` seconds."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._connection.close()
        self._join(timeout)
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._is_closing = True
        atexit.unregister(self.kill)
        if self.is_alive:
            self._process.kill()
        self._join(_GRACE_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.close()


def _ending(code: int | None) -> str:
    if code is None:
        return "and it is not known how"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit {code}"


@contextlib.contextmanager
def _outside_of_launcher() -> Any:
    """Without what tells a process that it is one of torchrun's: it is none."""
    names = ("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextlib.contextmanager
def _deaf() -> Any:
    """What this thread starts does not hear a signal before it has said what it does with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(theirs: connection.Connection, setup: bytes, nice: int, io_priority: str | None) -> None:
    for number in _OF_GROUPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUPS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    lower_priority(nice, io_priority)
    try:
        target, arguments = pickle.loads(setup)
        answer: Answer = target(*arguments)
    except Exception as error:
        theirs.send_bytes(_failure(error))
        return
    theirs.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            request, has_descriptor = pickle.loads(theirs.recv_bytes())
            descriptor = reduction.recv_handle(theirs) if has_descriptor else -1
        except (EOFError, OSError):
            break
        try:
            reply = pickle.dumps((True, answer(request, descriptor)))
        except Exception as error:
            reply = _failure(error)
        with contextlib.suppress(OSError):
            theirs.send_bytes(reply)
    close = getattr(answer, "close", None)
    if close is not None:
        close()


def _end_with(sentinel: int) -> None:
    """End this process when the one that started it is gone: nobody wants what it does."""
    connection.wait([sentinel])
    os._exit(1)


def _failure(error: Exception) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        data = pickle.dumps((False, error))
        pickle.loads(data)
    except Exception:
        return pickle.dumps((False, RuntimeError(f"in the background process: {text}")))
    return data
