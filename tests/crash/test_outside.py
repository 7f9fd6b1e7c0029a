"""Kills and faults from outside the process, and a real loss of power."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

CALLS = {
    "pwritev,pwritev2": 8,
    "fsync": 12,
    "rename,renameat,renameat2": 4,
    "unlink,unlinkat": 5,
    "ftruncate": 2,
    "fallocate": 2,
    "openat": 12,
    "symlink,symlinkat": 2,
    "mkdir,mkdirat": 3,
}
FAULTS = [
    ("pwritev,pwritev2", "ENOSPC"),
    ("fsync", "EIO"),
    ("rename,renameat,renameat2", "EIO"),
    ("unlink,unlinkat", "EACCES"),
    ("ftruncate", "EIO"),
    ("fallocate", "ENOSPC"),
    ("symlink,symlinkat", "EROFS"),
    ("mkdir,mkdirat", "EDQUOT"),
]


def stop_by(crash: Callable[..., Any], tmp_path: Path, calls: str, how: str) -> list[str]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not here")
    start = "nothing" if "mkdir" in calls else "ours"
    found = crash(
        "outside:kill_by_system_call", str(tmp_path), start, "torch_save", calls, how, CALLS[calls]
    )
    if found["refused"]:
        pytest.skip(f"strace may not attach: {found['refused']}")
    assert found["problems"] == []
    ends: list[str] = found["ends"]
    return ends


@pytest.mark.parametrize("calls", CALLS)
def test_a_save_killed_at_a_system_call(
    crash: Callable[..., Any], tmp_path: Path, calls: str
) -> None:
    assert "killed" in stop_by(crash, tmp_path, calls, "signal=SIGKILL")


@pytest.mark.parametrize(("calls", "code"), FAULTS)
def test_a_save_whose_system_call_fails(
    crash: Callable[..., Any], tmp_path: Path, calls: str, code: str
) -> None:
    assert set(stop_by(crash, tmp_path, calls, f"error={code}")) <= {"ok", "error"}


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """An image with an ext4 file system on it, and where it is mounted."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    for command in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(mount)],
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not here")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield image, mount
    while os.path.ismount(mount):
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize("start", ["ours", "nothing"])
def test_an_ext4_that_shuts_down_in_a_save(
    crash: Callable[..., Any], tmp_path: Path, ext4: tuple[Path, Path], start: str
) -> None:
    image, mount = map(str, ext4)
    found = crash("outside:shut_down", str(tmp_path), image, mount, start, "torch_save")
    assert found["problems"] == []
    assert found["points"] > 40


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors"])
@pytest.mark.parametrize("seed", range(4))
def test_a_save_of_four_threads_killed_at_random_times(
    crash: Callable[..., Any], tmp_path: Path, seed: int, serialization: str
) -> None:
    found = crash("outside:kill_randomly", str(tmp_path), serialization, 25, seed)
    assert found["problems"] == []
    assert found["ways"].get("killed", 0) > 5 and found["files"] > 1
