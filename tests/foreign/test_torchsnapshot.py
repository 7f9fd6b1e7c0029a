"""Snapshots: see ``snapshot_files``; ``tests/ecosystem/test_foreign.py`` takes the real library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_pipeline.core.errors import CheckpointError, FormatError, UnsafeCheckpointError
from dcp_pipeline.formats.bounded_yaml import parse_yaml_object
from dcp_pipeline.layout.foreign import recognize
from tests.foreign.loading import assert_equal, nested, opened
from tests.foreign.snapshot_files import write_snapshot

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("is_json", [True, False])
def test_everything_of_two_ranks(tmp_path: Path, is_json: bool) -> None:
    wanted = write_snapshot(tmp_path, is_json)
    assert recognize(str(tmp_path)) == "torchsnapshot"
    assert_equal(nested(tmp_path), wanted)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / ".snapshot_metadata"
    metadata = json.loads(file.read_text())
    change(metadata["manifest"])
    file.write_text(json.dumps(metadata))


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "absolute": lambda m: m["0/app/own"].update(location="/etc/passwd"),
    "parent": lambda m: m["0/app/own"].update(location="a/../../x"),
    "beyond": lambda m: m["0/app/shared"].update(byte_range=[0, 1 << 40]),
    "negative": lambda m: m["0/app/shared"].update(byte_range=[-6, 0]),
    "backwards": lambda m: m["0/app/shared"].update(byte_range=[6, 0]),
    "overlap": lambda m: m["0/app/shared"].update(byte_range=[0, 6]),
    "huge": lambda m: m["0/app/own"].update(shape=[1 << 50, 1 << 50]),
    "negative size": lambda m: m["0/app/own"].update(shape=[-2]),
    "dtype": lambda m: m["0/app/own"].update(dtype="torch.nn"),
    "serializer": lambda m: m["0/app/own"].update(serializer="pickle"),
    "type": lambda m: m["0/app/own"].update(type="Code"),
    "gap": lambda m: m["1/app/weight"]["shards"][0].update(offsets=[3, 0]),
    "shard": lambda m: m["1/app/weight"]["shards"][0].update(sizes=[2, 2]),
    "no shards": lambda m: m["1/app/weight"].update(shards=3),
    "primitive": lambda m: m["0/app/step"].update(serialized_value="1x"),
    "digits": lambda m: m["0/app/step"].update(serialized_value="9" * 5000),
    "rank": lambda m: m.update({"9/app/x": m["0/app/step"]}),
    "list": lambda m: m.update({"0/app/seen/x": m["0/app/step"]}),
    "position": lambda m: m.update({"0/app/seen/99999999999": m["0/app/step"]}),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_metadata_that_lie_are_refused(tmp_path: Path, name: str) -> None:
    write_snapshot(tmp_path)
    edit(tmp_path, CHANGES[name])
    with pytest.raises(CheckpointError):
        opened(tmp_path)


def test_an_object_that_runs_code_is_refused(tmp_path: Path) -> None:
    write_snapshot(tmp_path)
    (tmp_path / "replicated" / "none").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError):
        nested(tmp_path)


LAUGHS = "a: &a [x, x]\n" + "\n".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [*{chr(97 + n)}, *{chr(97 + n)}]" for n in range(20)
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LAUGHS, "alias or an anchor"),
        ("a: &x 1", "alias or an anchor"),
        ("a: !!python/object/apply:os.system [ls]", "tag"),
        ("a: !!binary aGk=", "tag"),
        ("[" * 500, "nested"),
        ("a: " + "[" * 65 + "]" * 65, "nested"),
        ("x: 1\n" * 200, "values"),
    ],
)
def test_yaml_that_attacks_is_refused(text: str, what: str) -> None:
    with pytest.raises(UnsafeCheckpointError, match=what):
        parse_yaml_object(text.encode(), "it", most_bytes=1 << 20, most_values=300)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: 1\na: 2", "stands twice"),
        ("[1]", "expected a mapping"),
        ("{[1]: 2}", "no text"),
        ("a: [1", "not YAML"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("\xff", "expected a mapping"),
    ],
)
def test_yaml_that_is_no_mapping_of_texts(text: str, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        parse_yaml_object(text.encode(), "it", most_bytes=1 << 20)


def test_yaml_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(UnsafeCheckpointError, match="at most 3 are read"):
        parse_yaml_object(b"a: 1", "it", most_bytes=3)
