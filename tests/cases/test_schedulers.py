"""T40: a scheduler and its optimizer are loaded together, or neither."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_pipeline import AppState, ConfigError, load, save


def job(form: str) -> tuple[Any, torch.optim.Optimizer, Any]:
    """State, optimizer and scheduler; the optimizer as torch has it, or in an AppState."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if form == "app":
        return {"app": AppState(model, optimizer, schedule=scheduler)}, optimizer, scheduler
    return {"app": {"optimizer": optimizer, "schedule": scheduler}}, optimizer, scheduler


def leaving_out(*keys: str) -> dict[str, Any]:
    return {"transforms": [{"kind": "exclude", "keys": list(keys), "on": "load"}]}


@pytest.mark.parametrize("form", ["app", "plain"])
def test_t40_the_optimizer_alone_is_left_out(tmp_path: Path, form: str) -> None:
    state, optimizer, scheduler = job(form)
    optimizer.step()
    scheduler.step()
    save(state, checkpoint_id=tmp_path / "c")
    fresh, other, schedule = job(form)
    with pytest.raises(ConfigError, match=r"app\.optimizer is left out .* and app\.schedule"):
        load(fresh, checkpoint_id=tmp_path / "c", config=leaving_out("app.optimizer.*"))
    assert schedule.last_epoch == 0 and other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("form", ["app", "plain"])
def test_t40_the_scheduler_alone_is_left_out(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    state, optimizer, scheduler = job(form)
    optimizer.step()
    scheduler.step()
    save(state, checkpoint_id=tmp_path / "c")
    fresh, other, schedule = job(form)
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        load(fresh, checkpoint_id=tmp_path / "c", config=leaving_out("app.schedule.*"))
    assert "app.schedule, which is left out" in caplog.text
    assert schedule.last_epoch == 0 and other.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize("form", ["app", "plain"])
@pytest.mark.parametrize("keys", [(), ("app.optimizer.*", "app.schedule.*")])
def test_both_or_none(
    tmp_path: Path, form: str, keys: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    state, optimizer, scheduler = job(form)
    optimizer.step()
    scheduler.step()
    save(state, checkpoint_id=tmp_path / "c")
    fresh, _, schedule = job(form)
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        load(fresh, checkpoint_id=tmp_path / "c", config=leaving_out(*keys) if keys else None)
    assert schedule.last_epoch == (0 if keys else 1)
    assert not caplog.text
