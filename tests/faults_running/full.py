"""Saves onto file systems that are really full, and under a real limit of the size of files."""

from __future__ import annotations

import errno
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dcp_pipeline.storage.filesystem import FileSystemStorage
from tests.faults_running.jobs import left_over, listing, nothing_leaks, pipeline_of, several_files

__all__ = ["can_mount", "limited", "on_small_disk", "without_inodes"]

MIB = 1 << 20


def state_of(mib: int, value: float = 1.0) -> dict[str, Any]:
    return {f"w{place}": torch.full((mib * MIB // 16,), value) for place in range(4)}


@contextmanager
def mounted(path: Path, options: str) -> Iterator[None]:
    """A file system in memory at ``path``.

    Raises:
        OSError: this process may not mount.
    """
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.returncode, done.stderr)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def can_mount(path: Path) -> bool:
    """Whether this process may mount, with all that takes."""
    try:
        with mounted(path, "size=1m"):
            return True
    except OSError:
        return False


def on_small_disk(path: Path, reserve_space: bool, direct_io: bool) -> list[str]:
    """A second checkpoint does not fit beside the first; what was wrong."""
    with mounted(path, "size=24m"):
        return _problems(path, path.parent / "elsewhere", errno.ENOSPC, 8, 20, {
            "reserve_space": reserve_space, "direct_io": direct_io})  # fmt: skip


def without_inodes(path: Path) -> list[str]:
    """No file can be made any more."""
    with mounted(path, "size=64m,nr_inodes=9"):
        return _problems(path, path.parent / "elsewhere", errno.ENOSPC, 8, 8, {})


def limited(root: Path, reserve_space: bool, direct_io: bool) -> list[str]:
    """No file may be larger than 3 MiB, for a while; for a process with nothing else to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    settings = {"reserve_space": reserve_space, "direct_io": direct_io}

    def limit(nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))

    try:
        return _problems(
            root / "limited",
            root / "elsewhere",
            errno.EFBIG,
            4,
            16,
            settings,
            before=lambda: limit(3 * MIB),
            after=lambda: limit(soft),
        )
    finally:
        limit(soft)


def _problems(
    path: Path,
    elsewhere: Path,
    code: int,
    fits: int,
    too_much: int,
    settings: dict[str, Any],
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
) -> list[str]:
    storage = FileSystemStorage(thread_count=2, buffer_bytes=MIB, **settings)
    problems = []
    with nothing_leaks(), several_files(), pipeline_of(storage=storage) as pipeline:
        pipeline.save(state_of(fits), path / "checkpoint", no_dist=True)
        there = listing(path / "checkpoint")
        before()
        for _ in range(2):
            try:
                pipeline.save(state_of(too_much, 2.0), path / "checkpoint", no_dist=True)
                problems.append("it was saved")
            except OSError as error:
                words = ["rank 0", errno.errorcode[code], str(path), "bytes wanted", "free in"]
                said = f"{error} ({error.filename})"
                problems += [f"no {word} in {said}" for word in words if word not in said]
                if error.errno != code or not str(error.filename).startswith(str(path)):
                    problems.append(said)
            if listing(path / "checkpoint") != there:
                problems.append(f"left {listing(path / 'checkpoint')}")
        after()
        pipeline.save(state_of(too_much, 3.0), elsewhere, no_dist=True)
        for place, mib, value in ((path / "checkpoint", fits, 1.0), (elsewhere, too_much, 3.0)):
            state = state_of(mib, -1.0)
            pipeline.load(state, place, no_dist=True)
            if {float(v) for tensor in state.values() for v in tensor.unique()} != {value}:
                problems.append(f"{place} does not hold {value}")
            problems += [f"left in {place}: {left_over(place)}"] if left_over(place) else []
    return problems
