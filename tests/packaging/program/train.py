"""A user's Hydra program: it mounts our configs at ``checkpoint``."""

import json

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import dcp_pipeline
from dcp_pipeline.config.compose import compose, from_user


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config: DictConfig) -> None:
    """Print the checkpoint config that the command line came to."""
    report = {
        "config": from_user(config.checkpoint).to_dict(),
        "package": dcp_pipeline.__path__[0],
        "other": compose(["storage=memory"]).config.storage.kind,
        "job": HydraConfig.get().job.name,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
