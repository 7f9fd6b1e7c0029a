"""Models that accelerate has prepared for FSDP2.

Where there are CPUs only, accelerate leaves its FSDP alone and takes DDP. So this test tells it
that FSDP is on; what shards the model then, and wraps the optimizer, is accelerate's own code.
"""

import os
from pathlib import Path

import pytest

from dcp_pipeline import load, save
from tests.distributed.pool import Pool
from tests.ecosystem.models import MODELS, Job

pytestmark = pytest.mark.filterwarnings("default")  # the packages have their own


def save_and_resume(path: Path) -> tuple[str, list[float], list[float]]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    def job_of(seed: int) -> Job:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        accelerator = Accelerator(cpu=True)
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        job = Job(MODELS["llama"], seed, prepare=lambda model: model)
        job.model, job.optimizer = accelerator.prepare(job.model, job.optimizer)
        return job

    job = job_of(0)
    job.train(0, 2)
    save({"app": job.app()}, checkpoint_id=path)
    resumed = job_of(1)
    load({"app": resumed.app()}, checkpoint_id=path)
    kinds = {type(parameter).__name__ for parameter in job.model.parameters()}
    losses = job.train(2, 4), resumed.train(2, 4)
    AcceleratorState._reset_state(reset_partial_state=True)  # the ranks live on
    return ",".join(kinds), *losses


def test_a_resume_is_exact(ranks: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    for kinds, expected, found in ranks(2).run(save_and_resume, tmp_path, seconds=200.0):
        assert kinds == "DTensor"
        assert found == expected
