"""The checkpoint plugin for Lightning, where that is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_pipeline
from tests.examples.running import call

pytestmark = pytest.mark.filterwarnings("default")  # the package has its own


def fit(root: Path, epochs: int, go_on_from: Path | None = None) -> list[float]:
    """The losses of a run that keeps its best and its last checkpoint."""
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 2)
            self.losses: list[float] = []

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            loss = self.layer(batch[0]).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    keeping = lightning.callbacks.ModelCheckpoint(root, monitor="loss", save_last=True)
    module = Module()
    lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        plugins=[call("lightning_io", "PipelineCheckpointIO")],
        callbacks=[keeping],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=go_on_from)
    return module.losses


def test_a_resume_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    unbroken = fit(tmp_path / "unbroken", epochs=4)
    before = fit(tmp_path / "broken", epochs=2)
    after = fit(tmp_path / "resumed", epochs=4, go_on_from=tmp_path / "broken" / "last.ckpt")
    assert before + after == unbroken
    names = {path.name for path in (tmp_path / "unbroken").iterdir()}
    assert names == {"epoch=3-step=16.ckpt", "last.ckpt"}  # the others were removed
    assert dcp_pipeline.verify(tmp_path / "resumed" / "last.ckpt").is_well
