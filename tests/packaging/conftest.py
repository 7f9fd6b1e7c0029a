"""The package from the tree, from an unpacked sdist, and from the wheel built of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Home:
    """A place that the package is imported from.

    Attributes:
        python: the interpreter that finds it there.
        package: the folder it has to come from.
        environment: what to add to the environment.
    """

    python: Path
    package: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run the interpreter in ``folder``, away from the source tree."""
        dropped = ("PYTHONPATH", "PYTHONHOME", "COLUMNS")
        environment = {key: value for key, value in os.environ.items() if key not in dropped}
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=folder,
            env={**environment, **self.environment, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )

    def report(self, *arguments: str, folder: Path) -> Any:
        """Run the interpreter, and return the JSON that it prints."""
        done = self.run(*arguments, folder=folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def _tree() -> Home:
    return Home(Path(sys.executable), ROOT / "dcp_pipeline", {"PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the tree, and the wheel of that sdist."""
    folder = tmp_path_factory.mktemp("archives")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def sdist(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return Home(Path(sys.executable), root / "dcp_pipeline", {"PYTHONPATH": str(root)})


@pytest.fixture(scope="session")
def wheel(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A virtual environment with the wheel, which borrows its dependencies from this one."""
    folder = tmp_path_factory.mktemp("wheel") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # A path named in a .pth file is searched, but its own .pth files are not read: an editable
    # install of the source tree stays out of sight.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    archive = next(archives.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    subprocess.run([*command, *options, str(archive)], check=True)
    return Home(python, site / "dcp_pipeline")


@pytest.fixture(params=["tree", "sdist", "wheel"])
def home(request: pytest.FixtureRequest) -> Home:
    """Each of the places in turn."""
    if request.param == "tree":
        return _tree()
    found: Home = request.getfixturevalue(request.param)
    return found
