from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MEMORY = "/dev/shm"


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory in memory where there is such a thing: hundreds of syncs cost little there."""
    folder = MEMORY if os.access(MEMORY, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="dcp-pipeline-", dir=folder))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def forked() -> Iterator[Callable[..., Any]]:
    """Calls a function of this folder in a process that may fork: ``forked("lost:sweep", 1)``."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-W", "ignore::UserWarning", "-m", "tests.crash.server"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def call(name: str, *args: Any) -> Any:
        requests.write(json.dumps([f"tests.faults_running.{name}", args]) + "\n")
        requests.flush()
        line = answers.readline()
        assert line, f"the server ended: {process.wait(timeout=10)}"
        answer = json.loads(line)
        if "trace" in answer:
            raise AssertionError(answer["trace"])
        return answer["value"]

    yield call
    requests.close()
    process.wait(timeout=30)
    answers.close()
