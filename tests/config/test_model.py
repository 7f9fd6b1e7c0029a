import json
from typing import Any, ClassVar, Literal

import pytest

from dcp_pipeline.config.compose import load_mapping
from dcp_pipeline.config.explain import validate
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.dtypes import ITEM_SIZES
from dcp_pipeline.core.errors import CheckpointError, ConfigError
from dcp_pipeline.core.kind import KindConfig, parse_bytes
from dcp_pipeline.core.registry import GROUPS, register, unregister
from dcp_pipeline.staging.config import HostStagerConfig, InplaceStagerConfig
from dcp_pipeline.storage.config import FileSystemConfig, MemoryConfig

EVERYTHING: dict[str, Any] = {
    "stager": "inplace",
    "planner": {"kind": "default", "dedup": "lowest_rank", "split_bytes": "1MiB"},
    "coordination": {"timeout_seconds": 60, "poll_seconds": 1},
    "serialization": {"kind": "torch_save", "safe_globals": ["mypkg.Thing"]},
    "layout": {"checksum": "sha256", "block_bytes": "128KiB"},
    "storage": FileSystemConfig(thread_count=4),
    "background": {"kind": "process", "retries": 2, "io_priority": "idle"},
    "manager": {"keep_last": 3, "stop_signals": ["SIGUSR1"]},
    "rollback": "none",
    "strict": {"model": False, "model.head": True},
    "casts": ["optimizer.*", {"keys": "*", "source": "float32", "target": "bfloat16"}],
    "transforms": [
        {"kind": "exclude", "keys": ["optimizer.*"], "on": "load"},
        {"kind": "cast", "keys": ["*"], "dtype": "bfloat16"},
    ],
    "overwrite": "error",
}


def problem(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        validate(settings)
    return caught.value


def test_defaults() -> None:
    # The fields of the kinds are compared with the YAML files in test_yaml_files.py.
    config = PipelineConfig()
    assert {group: getattr(config, group).kind for group in GROUPS} == {
        "stager": "inplace",
        "planner": "default",
        "coordination": "process_group",
        "serialization": "torch_save",
        "layout": "dcp",
        "storage": "filesystem",
        "background": "thread",
        "manager": "default",
    }
    rest = {key: value for key, value in config.to_dict().items() if key not in GROUPS}
    assert rest == {
        "rollback": "copy",
        "strict": True,
        "casts": [],
        "transforms": [],
        "overwrite": "replace",
        "read_replicas": "auto",
        "fingerprint": True,
    }


@pytest.mark.parametrize("stager", ["inplace", {"kind": "inplace"}, InplaceStagerConfig()])
def test_a_group_is_a_name_a_mapping_or_a_config(stager: object) -> None:
    assert PipelineConfig(stager=stager).stager == InplaceStagerConfig()


def test_a_mapping_without_kind_is_of_the_default_kind() -> None:
    storage = PipelineConfig(storage={"thread_count": 7}).storage
    assert storage == FileSystemConfig(thread_count=7)


def test_json_data_comes_back_equal() -> None:
    config = validate(EVERYTHING)
    data = json.loads(json.dumps(config.to_dict()))
    again = PipelineConfig.model_validate(data)
    assert again == config
    assert again.digest() == config.digest()
    assert data["casts"][0] == {
        "keys": "optimizer.*",
        "source": None,
        "target": None,
        "on_overflow": "report",
    }
    assert data["planner"]["split_bytes"] == 1048576


def test_the_digest_is_of_the_values_not_of_how_they_were_written() -> None:
    assert validate({"layout": {"block_bytes": "64KiB"}}).digest() == PipelineConfig().digest()
    assert validate({"layout": {"block_bytes": "128KiB"}}).digest() != PipelineConfig().digest()
    backwards = dict(reversed(EVERYTHING.items()))
    assert validate(backwards).digest() == validate(EVERYTHING).digest()
    assert len(PipelineConfig().digest()) == 64


def test_a_config_never_changes() -> None:
    config = PipelineConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.rollback = "none"
    with pytest.raises(ValueError, match="frozen"):
        config.storage.kind = "memory"


def test_load_mapping_gives_a_config_back_as_it_is() -> None:
    config = PipelineConfig()
    assert load_mapping(config) is config


@pytest.mark.parametrize(
    ("text", "size"),
    [("64KiB", 65536), ("1GB", 10**9), ("1.5 MiB", 1572864), ("7", 7), ("7B", 7), ("2TiB", 2**41)],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("value", ["64K", "64kib", "-1KiB", "", "0.3B", "0", 0, -4096, 1.5, True])
def test_bytes_refused(value: object) -> None:
    assert problem(storage={"buffer_bytes": value}).path == "storage.buffer_bytes"


def test_the_dtypes_are_torchs_with_torchs_sizes() -> None:
    torch = pytest.importorskip("torch")
    assert {name: getattr(torch, name).itemsize for name in ITEM_SIZES} == dict(ITEM_SIZES)


def test_strictness_by_pattern() -> None:
    config = validate({"strict": {"model": False, "model.head.*": True, "opt*.step": False}})
    keys = ("model", "model.body", "model.head.weight", "modelling", "optimizer.step", "other")
    assert [config.is_strict(key) for key in keys] == [False, False, True, True, False, True]
    assert PipelineConfig(strict=False).is_strict("model") is False


class OnlySafetensors(KindConfig):
    works_with: ClassVar = {"serialization": ("safetensors",)}
    kind: Literal["only_safetensors"] = "only_safetensors"

    def build(self) -> str:
        return "built"


def test_kinds_that_do_not_go_together_are_refused() -> None:
    register("layout", "only_safetensors", OnlySafetensors)
    try:
        filled = validate({"layout": "only_safetensors"})
        assert filled.serialization.kind == "safetensors"  # what is left out is filled in
        error = problem(layout="only_safetensors", serialization="torch_save")
        assert error.path == "serialization"
        assert str(error) == (
            "serialization: found 'torch_save'; layout=only_safetensors cannot be combined with "
            "it; it works with: safetensors"
        )
        config = validate({"layout": "only_safetensors", "serialization": "safetensors"})
        assert config.layout.build() == "built"
    finally:
        unregister("layout", "only_safetensors")


def test_a_kind_without_build_cannot_be_made() -> None:
    class Unfinished(KindConfig):
        kind: Literal["unfinished"] = "unfinished"

    with pytest.raises(TypeError, match="abstract"):
        Unfinished()


MESSAGES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"sorage": {}},
        "sorage",
        "sorage: unknown key; a config takes: stager, planner, coordination, serialization, "
        "layout, storage, background, manager, rollback, strict, casts, transforms, overwrite,"
        " read_replicas, fingerprint; did you "
        "mean 'storage'?",
    ),
    (
        {"storage": {"thred_count": 4}},
        "storage.thred_count",
        "storage.thred_count: unknown key; storage=filesystem takes the keys thread_count, "
        "sync_files, direct_io, reserve_space, buffer_bytes, stale_after_seconds; "
        "did you mean 'thread_count'?",
    ),
    (
        {"storage": {"kind": "memory", "thread_count": 4}},
        "storage.thread_count",
        "storage.thread_count: a key of storage=filesystem, which is not chosen; storage=memory "
        "takes no keys (where a recipe sets it, ~storage.thread_count takes it out)",
    ),
    (
        {"serialization": {"kind": "safetensors", "compression": 3}},
        "serialization.compression",
        "serialization.compression: unknown key; serialization=safetensors takes no keys",
    ),
    (
        {"storage": {"kind": "filesytem"}},
        "storage.kind",
        "storage.kind: found the kind 'filesytem'; allowed: filesystem, memory; "
        "did you mean 'filesystem'?",
    ),
    (
        {"stager": "gpu"},
        "stager",
        "stager: found the kind 'gpu'; allowed: host, inplace, pinned, shared",
    ),
    (
        {"stager": {"kind": 3}},
        "stager.kind",
        "stager.kind: expected the name of a kind",
    ),
    (
        {"stager": 3},
        "stager",
        "stager: found 3; expected the name of a kind, or a mapping with a kind and its keys",
    ),
    (
        {"storage": HostStagerConfig()},
        "storage",
        "storage: found the kind 'host'; allowed: filesystem, memory",
    ),
    (
        {"storage": {"thread_count": 65}},
        "storage.thread_count",
        "storage.thread_count: found 65; expected at most 64",
    ),
    (
        {"storage": {"thread_count": "4"}},
        "storage.thread_count",
        "storage.thread_count: found '4'; expected an integer",
    ),
    (
        {"storage": {"thread_count": True}},
        "storage.thread_count",
        "storage.thread_count: found true; expected an integer",
    ),
    (
        {"storage": {"sync_files": 1}},
        "storage.sync_files",
        "storage.sync_files: found 1; expected true or false",
    ),
    (
        {"storage": {"buffer_bytes": 5000}},
        "storage.buffer_bytes",
        "storage.buffer_bytes: found 5000; expected a multiple of 4KiB",
    ),
    (
        {"layout": {"block_bytes": "3KiB"}},
        "layout.block_bytes",
        "layout.block_bytes: found '3KiB'; expected a power of two from 4KiB to 16MiB",
    ),
    (
        {"layout": {"checksum": "md5"}},
        "layout.checksum",
        "layout.checksum: found 'md5'; allowed: xxh3_64, crc32, sha256",
    ),
    (
        {"coordination": {"timeout_seconds": 0}},
        "coordination.timeout_seconds",
        "coordination.timeout_seconds: found 0; expected more than 0",
    ),
    (
        {"coordination": {"timeout_seconds": 1, "poll_seconds": 2}},
        "coordination",
        "coordination: poll_seconds (2) is above timeout_seconds (1), so no poll would ever come "
        "in time",
    ),
    (
        {"serialization": {"safe_globals": ["Thing"]}},
        "serialization.safe_globals",
        "serialization.safe_globals: found ['Thing']; 'Thing' is no dotted name such as "
        "'my_package.Thing'",
    ),
    (
        {"rollback": False},
        "rollback",
        "rollback: found false; allowed: copy, verify_first, none "
        "(YAML reads a bare off, no and false as the boolean false)",
    ),
    (
        {"rollback": None},
        "rollback",
        "rollback: found null; allowed: copy, verify_first, none (null is not the word none)",
    ),
    (
        {"rollback": "verify"},
        "rollback",
        "rollback: found 'verify'; allowed: copy, verify_first, none; did you mean 'verify_first'?",
    ),
    (
        {"strict": "yes"},
        "strict",
        "strict: found 'yes'; expected true, false, or a mapping of patterns on keys to true or "
        "false",
    ),
    (
        {"strict": {"model": "no"}},
        "strict.model",
        "strict.model: found 'no'; expected true or false",
    ),
    (
        {"casts": [{"keys": "*", "source": "float32", "target": "float32"}]},
        "casts[0]",
        "casts[0]: a cast from float32 to itself changes nothing",
    ),
    (
        {"casts": [{"key": "*"}]},
        "casts[0].keys",
        "2 problems in the config:\n  casts[0].keys: missing; it has to be given\n"
        "  casts[0].key: unknown key; a cast takes: keys, source, target, on_overflow; "
        "did you mean 'keys'?",
    ),
    (
        {"transforms": [{"kind": "exclude", "keys": []}]},
        "transforms[0].keys",
        "transforms[0].keys: found []; expected at least 1 of them",
    ),
    (
        {"transforms": ["include"]},
        "transforms[0].keys",
        "transforms[0].keys: missing; it has to be given",
    ),
    (
        {"transforms": [{"keys": ["*"]}]},
        "transforms[0].kind",
        "transforms[0].kind: missing; it must name a kind",
    ),
    (
        {"transforms": [{"kind": "exclude", "keys": ["*"], "when": "save"}]},
        "transforms[0].when",
        "transforms[0].when: unknown key; the rule exclude takes: keys, on",
    ),
    (
        {"transforms": {"kind": "exclude"}},
        "transforms",
        "transforms: found {'kind': 'exclude'}; expected a list",
    ),
]


@pytest.mark.parametrize(("settings", "path", "message"), MESSAGES, ids=[m[1] for m in MESSAGES])
def test_message(settings: dict[str, Any], path: str, message: str) -> None:
    error = problem(**settings)
    assert str(error) == message
    assert error.path == path
    assert isinstance(error, CheckpointError) and isinstance(error, ValueError)


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    error = problem(casts=[{"keys": "*", "target": "torch.float32"}])
    assert str(error) == (
        f"casts[0].target: found 'torch.float32'; allowed: {', '.join(ITEM_SIZES)}"
    )


def test_everything_that_is_wrong_is_reported_at_once() -> None:
    error = problem(storage={"thread_count": 0, "nope": 1}, rollback="x", stager="y")
    assert error.path == "stager"
    assert str(error).splitlines() == [
        "4 problems in the config:",
        "  stager: found the kind 'y'; allowed: host, inplace, pinned, shared",
        "  storage.thread_count: found 0; expected at least 1",
        "  storage.nope: unknown key; storage=filesystem takes the keys thread_count, sync_files, "
        "direct_io, reserve_space, buffer_bytes, stale_after_seconds",
        "  rollback: found 'x'; allowed: copy, verify_first, none",
    ]


def test_a_prefix_is_where_the_user_wrote_it() -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.storage: found the kind 'x'"):
        validate({"storage": "x"}, prefix="checkpoint")


def test_memory_storage_stands_beside_any_other_kind() -> None:
    assert validate({"storage": "memory"}).storage == MemoryConfig()
