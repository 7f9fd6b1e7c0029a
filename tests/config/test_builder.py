import sys
from types import ModuleType
from typing import Any

import pytest

from dcp_pipeline.builder import PipelineBuilder
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.storage.config import FileSystemConfig


def test_nothing_said_is_the_default_config() -> None:
    assert PipelineBuilder().config() == PipelineConfig()


def test_every_part() -> None:
    config = (
        PipelineBuilder()
        .stager("inplace")
        .planner("default", dedup="lowest_rank")
        .coordination("single_process")
        .serialization("torch_save", safe_globals=["mypkg.Thing"])
        .layout("dcp", checksum="crc32", block_bytes="1MiB")
        .storage(FileSystemConfig(thread_count=8))
        .strict(False)
        .cast("model.*", source="float32", target="bfloat16", on_overflow="error")
        .cast("optimizer.*")
        .transform("exclude", keys=["rng.*"])
        .transform("cast", keys=["model.*"], dtype="bfloat16")
        .rollback("verify_first")
        .overwrite("error")
        .config()
    )
    assert config == PipelineConfig.model_validate(
        {
            "stager": "inplace",
            "planner": {"dedup": "lowest_rank"},
            "coordination": "single_process",
            "serialization": {"safe_globals": ["mypkg.Thing"]},
            "layout": {"checksum": "crc32", "block_bytes": 1048576},
            "storage": {"thread_count": 8},
            "strict": False,
            "casts": [
                {
                    "keys": "model.*",
                    "source": "float32",
                    "target": "bfloat16",
                    "on_overflow": "error",
                },
                "optimizer.*",
            ],
            "transforms": [
                {"kind": "exclude", "keys": ["rng.*"]},
                {"kind": "cast", "keys": ["model.*"], "dtype": "bfloat16"},
            ],
            "rollback": "verify_first",
            "overwrite": "error",
        }
    )


def test_the_last_word_on_a_part_counts() -> None:
    builder = PipelineBuilder().storage("filesystem", thread_count=8).storage("memory")
    assert builder.config().storage.kind == "memory"


def test_mistakes_are_reported_together_when_it_is_built() -> None:
    builder = PipelineBuilder().storage("memory", thread_count=4).stager("gpu")
    for finish in (builder.config, builder.build):
        with pytest.raises(ConfigError) as caught:
            finish()
        assert str(caught.value).startswith(
            "2 problems in the config:\n  stager.kind: found the kind"
        )
        assert "storage.thread_count: a key of storage=filesystem" in str(caught.value)


def test_fields_beside_a_config() -> None:
    with pytest.raises(ConfigError, match="give fields with the name of a kind") as caught:
        PipelineBuilder().storage(FileSystemConfig(), thread_count=4)
    assert caught.value.path == "storage"


def test_nodes_go_to_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}

    class Pipeline:
        def __init__(self, config: PipelineConfig, **nodes: Any) -> None:
            made.update(nodes, config=config)

    stand_in = ModuleType("dcp_pipeline.pipeline")
    stand_in.Pipeline = Pipeline  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dcp_pipeline.pipeline", stand_in)
    first, second, third = object(), object(), object()
    builder = PipelineBuilder().node(first).node(second, graph="load").node(third, graph="save")
    assert isinstance(builder.build(), Pipeline)
    assert made == {
        "config": PipelineConfig(),
        "save_nodes": (first, third),
        "load_nodes": (second,),
    }


def test_an_unknown_graph() -> None:
    with pytest.raises(ConfigError, match="found the graph 'sav'; allowed: save, load"):
        PipelineBuilder().node(object(), graph="sav")  # type: ignore[arg-type]
