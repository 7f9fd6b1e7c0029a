"""The demo stops at the first act that fails, and says so by its exit code."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("demo")
    monkeypatch.setattr(module, "RUN", tmp_path / "demo-run")
    return module


def act(demo: ModuleType, *outcomes: bool) -> Callable[[], list[object]]:
    return lambda: [demo.Check(f"claim {n}", holds, "") for n, holds in enumerate(outcomes)]


@pytest.mark.parametrize(
    ("acts", "exit_code", "printed"),
    [
        ([(True,), (True, True), (True,)], 0, "4 checks, 0 failed"),
        ([(True,), (True, False), (True,)], 1, "3 checks, 1 failed"),
        ([(False,), (True, True), (True,)], 1, "1 checks, 1 failed"),
        ([(True,), (True, True), (False,)], 1, "4 checks, 1 failed"),
    ],
)
def test_the_exit_code(
    demo: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    acts: list[tuple[bool, ...]],
    exit_code: int,
    printed: str,
) -> None:
    names = ("lose_a_rank", "resume", "open_with_plain_dcp")
    for name, outcomes in zip(names, acts, strict=True):
        monkeypatch.setattr(demo, name, act(demo, *outcomes))
    assert demo.main() == exit_code
    output = capsys.readouterr().out
    assert printed in output
    assert output.count("FAILED") == exit_code
