"""The store of a process group, asked without ever waiting for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["AskedStore"]


class AskedStore:
    """Puts questions to a store whose host may have ended, or may have been stopped.

    A host that was stopped lets one wait for minutes, and no signal gets through to there; so
    every question is put in a thread.

    Args:
        store: of ``torch.distributed``.
        timeout: seconds after which a store that does not answer is given up for good.

    Attributes:
        is_lost: whether it was given up.
    """

    def __init__(self, store: Any, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self._pending: threading.Thread | None = None
        self._since = 0.0
        self.is_lost = False

    @property
    def does_not_answer(self) -> bool:
        """Whether it was given up, or still owes an answer."""
        return self.is_lost or (self._pending is not None and self._pending.is_alive())

    def ask(self, question: Callable[[Any], Any], seconds: float) -> Any:
        """The answer, or ``None`` where there is none within ``seconds``."""
        if self.is_lost or not self._is_free(seconds):
            return None
        answers: list[Any] = []

        def put() -> None:
            try:
                answers.append(question(self._store))
            except RuntimeError:
                self.is_lost = True

        thread = threading.Thread(target=put, name="dcp_pipeline store", daemon=True)
        self._since = time.monotonic()
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            self._pending = thread
        return answers[0] if answers else None

    def _is_free(self, seconds: float) -> bool:
        """Whether the question before was answered; more of them would only pile up."""
        pending = self._pending
        if pending is None:
            return True
        pending.join(seconds)
        if not pending.is_alive():
            self._pending = None
            return not self.is_lost
        self.is_lost = time.monotonic() - self._since > self._timeout
        return False
