import shutil
import subprocess
from pathlib import Path

from .conftest import ROOT


def test_an_old_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-C", str(tmp_path), f"PYTHON={old}", "test"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_constraints_pin_every_dependency_and_name_no_index() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert all(line.count("==") == 1 for line in lines)
    assert not any("+" in line or "://" in line or line.startswith("-") for line in lines)
    assert "torch==2.13.0" in lines
