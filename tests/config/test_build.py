"""What the configs of the kinds build."""

import importlib
from typing import Any

import pytest

from dcp_pipeline.core.registry import GROUPS, TRANSFORM, kinds, model_of

REQUIRED: dict[str, dict[str, Any]] = {
    "cast": {"keys": ["model.*"], "dtype": "bfloat16"},
    "constant": {"key": "version", "value": 1.0},
    "drop": {"keys": ["rng"]},
    "exclude": {"keys": ["model.*"]},
    "fuse": {"from": ["q", "k"], "to": "qk"},
    "include": {"keys": ["model.*"]},
    "keep": {"keys": ["model.*"]},
    "pad": {"keys": ["embed"], "here": 10, "there": 16},
    "rename": {"keys": {"a": "b"}},
    "resize": {"keys": ["embed"], "size": 16},
    "reverse": {"rules": [{"kind": "transpose", "keys": ["w"]}]},
    "rotary": {"keys": ["q"], "head_dim": 8},
    "split": {"from": "qk", "to": ["q", "k"]},
    "stack": {"from": "w.{e}", "to": "w", "over": "e"},
    "tie": {"key": "head", "to": "embed"},
    "transpose": {"keys": ["w"]},
    "unstack": {"from": "w", "to": "w.{e}", "over": "e"},
}

MADE = {
    ("stager", "host"): "staging.host:HostStager",
    ("stager", "inplace"): "staging.inplace:InplaceStager",
    ("stager", "pinned"): "staging.host:PinnedStager",
    ("stager", "shared"): "staging.host:SharedStager",
    ("planner", "default"): "planning.default:DefaultPlanner",
    ("coordination", "process_group"): "coordination.process_group:ProcessGroupCoordination",
    ("coordination", "single_process"): "coordination.single_process:SingleProcessCoordination",
    ("serialization", "mega"): "serialization.mega:MegaSerialization",
    ("serialization", "safetensors"): "serialization.safetensors:SafetensorsSerialization",
    ("serialization", "torch_save"): "serialization.torch_save:TorchSaveSerialization",
    ("layout", "dcp"): "layout.dcp:DcpLayout",
    ("layout", "huggingface"): "layout.huggingface:HuggingFaceLayout",
    ("layout", "mega"): "layout.mega:MegaLayout",
    ("storage", "filesystem"): "storage.filesystem:FileSystemStorage",
    ("storage", "memory"): "storage.memory:MemoryStorage",
    ("background", "process"): "background.base:ProcessBackground",
    ("background", "thread"): "background.base:ThreadBackground",
    ("manager", "default"): "manager.retention:Retention",
    ("transform", "cast"): "rules.cast:CastRule",
    ("transform", "constant"): "rules.constant:ConstantRule",
    ("transform", "drop"): "rules.drop:DropRule",
    ("transform", "exclude"): "rules.exclude:ExcludeRule",
    ("transform", "fuse"): "rules.fuse:FuseRule",
    ("transform", "include"): "rules.include:IncludeRule",
    ("transform", "keep"): "rules.drop:KeepRule",
    ("transform", "pad"): "rules.pad:PadRule",
    ("transform", "rename"): "rules.rename:RenameRule",
    ("transform", "resize"): "rules.pad:ResizeRule",
    ("transform", "reverse"): "rules.reverse:ReverseRule",
    ("transform", "rotary"): "rules.rotary:RotaryRule",
    ("transform", "split"): "rules.fuse:SplitRule",
    ("transform", "stack"): "rules.stack:StackRule",
    ("transform", "tie"): "rules.tie:TieRule",
    ("transform", "transpose"): "rules.transpose:TransposeRule",
    ("transform", "unstack"): "rules.stack:UnstackRule",
}


def test_every_kind_is_listed_here() -> None:
    assert set(MADE) == {(group, kind) for group in (*GROUPS, TRANSFORM) for kind in kinds(group)}


@pytest.mark.parametrize(("group", "kind"), list(MADE))
def test_build(group: str, kind: str) -> None:
    module, _, name = MADE[group, kind].partition(":")
    config = model_of(group, kind).model_validate({"kind": kind, **REQUIRED.get(kind, {})})
    expected = getattr(importlib.import_module(f"dcp_pipeline.{module}"), name)
    assert type(config.build()) is expected
