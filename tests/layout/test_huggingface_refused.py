"""Repositories that contradict themselves."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp_pipeline
from dcp_pipeline.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FormatError,
    MissingFileError,
    UnsafeCheckpointError,
)
from tests.equal import assert_same
from tests.huggingface_files import every_dtype, index_of, save_shards
from tests.layout.test_huggingface_reading import (
    CONFIG,
    INDEX,
    opened,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_total_size_that_is_wrong_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight_map = save_shards(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)}, 2)
    with caplog.at_level(logging.WARNING, "dcp_pipeline"):
        opened(tmp_path)
        assert caplog.messages == []
        (tmp_path / INDEX).write_text(index_of(weight_map, total_size=17))
        opened(tmp_path)
        (tmp_path / INDEX).write_text(index_of({"a": weight_map["a"]}))
        os.remove(tmp_path / weight_map["b"])
        save_file({"a": torch.ones(2), "c": torch.ones(1)}, tmp_path / weight_map["a"])
        assert opened(tmp_path).names == ("a", "c")
    assert [message.split(" say")[0] for message in caplog.messages] == [
        f"{INDEX}",
        f"{INDEX} does not name c, which its files hold",
    ]


A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONTRADICTIONS: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "file_is_missing": (
        lambda path: os.remove(path / B), MissingFileError, f"{B} is not in .* 1 tensors in it: b"
    ),
    "key_is_missing": (
        lambda path: (path / INDEX).write_text(index_of({"a": A, "b": B, "c": B})),
        FormatError, rf"names 1 tensors that their files lack: c \({B}\)",
    ),
    "key_lies_elsewhere": (
        lambda path: (path / INDEX).write_text(index_of({"a": B, "b": B})),
        FormatError, "lack: a",
    ),
    "key_is_in_two_files": (
        lambda path: save_file({"a": torch.ones(2), "b": torch.ones(2)}, path / B),
        FormatError, f"{B}: it holds 'a', which {INDEX} places in '{A}'",
    ),
    "no_index_and_a_number_is_missing": (
        lambda path: (os.remove(path / INDEX), os.remove(path / A)),
        MissingFileError, "1 of the 2 files model-#####-of-00002",
    ),
    "no_index_and_a_key_in_two_files": (
        lambda path: (os.remove(path / INDEX), save_file({"a": torch.ones(2)}, path / B)),
        FormatError, f"'a' at .* is both in {A} and {B}",
    ),
    "weight_map_is_empty": (
        lambda path: (path / INDEX).write_text("{}"), FormatError, "has no weight_map"
    ),
    "weight_map_names_a_number": (
        lambda path: (path / INDEX).write_text('{"weight_map": {"a": 1}}'),
        FormatError, "places 'a' in a int",
    ),
    "path_is_absolute": (
        lambda path: (path / INDEX).write_text(index_of({"a": str(path / A), "b": B})),
        UnsafeCheckpointError, "no path inside",
    ),
    "path_leads_out": (
        lambda path: (path / INDEX).write_text(index_of({"a": f"../{path.name}/{A}", "b": B})),
        UnsafeCheckpointError, "no path inside",
    ),
    "duplicate_key": (
        lambda path: (path / INDEX).write_text(f'{{"weight_map": {{"a": "{A}", "a": "{B}"}}}}'),
        FormatError, "'a' stands twice",
    ),
    "half_a_surrogate": (
        lambda path: (path / INDEX).write_text(r'{"weight_map": {"\ud800": "x"}}'),
        FormatError, "is not JSON",
    ),
    "not_utf8": (
        lambda path: (path / INDEX).write_bytes(b'{"weight_map": {"\xff": "x"}}'),
        FormatError, "is not JSON",
    ),
    "file_is_cut_off": (
        lambda path: os.truncate(path / A, os.path.getsize(path / A) - 1),
        FormatError, f"{A}: ",
    ),
    "file_is_empty": (
        lambda path: (path / A).write_bytes(b""), FormatError, f"{A}: 0 bytes are too few"
    ),
    "file_is_a_pointer_of_git_lfs": (
        lambda path: (path / A).write_text("version https://git-lfs.github.com/spec/v1\n" * 3),
        UnsafeCheckpointError, f"{A}: ",
    ),
    "file_is_a_folder": (
        lambda path: (os.remove(path / A), (path / A).mkdir()), UnsafeCheckpointError, "no file"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_itself_is_refused_by_name(tmp_path: Path, name: str) -> None:
    save_shards(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2)}, 2)
    change, error, said = CONTRADICTIONS[name]
    change(tmp_path)
    with pytest.raises(error, match=said):
        opened(tmp_path)
    with pytest.raises(error, match=said):
        dcp_pipeline.load_keys(tmp_path, config=CONFIG)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nothing there"):
        opened(tmp_path / "none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFoundError, match="no model in it"):
        opened(tmp_path)


def test_the_official_library_reads_the_same(tmp_path: Path) -> None:
    state = every_dtype()
    save_file(state, tmp_path / "model.safetensors")
    theirs = load_file(tmp_path / "model.safetensors")
    assert_same(dcp_pipeline.load_keys(tmp_path, config=CONFIG), theirs)
