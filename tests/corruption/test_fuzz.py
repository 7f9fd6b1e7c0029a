"""Valid files with something changed: a named error comes out, or a value; nothing else, ever.

Seeded, and bounded by numbers of inputs. The ``slow`` runs go on with other seeds.
"""

import copy
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_pipeline
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.packing import pack_columns, unpack_columns
from dcp_pipeline.core.sums import parse_sums
from dcp_pipeline.core.tiling import tiling_problems
from dcp_pipeline.formats.metadata_pickle import read_metadata
from dcp_pipeline.formats.safetensors import parse_header
from dcp_pipeline.formats.torch_zip import parse_tensor_zip, read_value
from dcp_pipeline.layout.dcp_metadata import manifest_of
from dcp_pipeline.tools.verify import verify
from tests.corruption.forge import columns, edit, edit_columns, encode, resum

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    # Whatever a broken pickle makes torch warn of.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

JUNK: list[Any] = [
    None, True, 0, -1, 1, 7, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**400, 0.5, float("inf"),
    float("nan"), "", "x", "w", "\0", "../x", "\ud800", [], {}, [0], [[]], [None], {"a": 1},
    ["w", 1],
]  # fmt: skip


def seeds(count: int, slow: int) -> list[Any]:
    return [
        *range(count),
        *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(count, slow)],
    ]


def state() -> dict[str, Any]:
    tied = torch.arange(24.0).view(6, 4)
    return {
        "w": tied,
        "tied": tied,
        "list": [torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)],
        "c": torch.zeros(3, 2, dtype=torch.complex64),
        "array": np.arange(5),
        "settings": {"lr": 0.5, "names": ("x", {1: b"y"})},
        "empty": {},
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    for kind in ("torch_save", "safetensors"):
        config = {"serialization": kind}
        dcp_pipeline.save(state(), checkpoint_id=folder / kind, config=config)
    plain = {name: value for name, value in state().items() if name != "array"}
    dcp.save(plain, checkpoint_id=folder / "plain", no_dist=True)
    return folder


def changed(chance: random.Random, data: bytes) -> bytes:
    """Bytes with one to three changes of some kind."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 3)):
        if not result:
            break
        at = chance.randrange(len(result))
        how = chance.randrange(8)
        if how == 0:
            result[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            result[at] = chance.randrange(256)
        elif how == 2:
            del result[at : at + chance.randint(1, 40)]
        elif how == 3:
            result[at:at] = result[chance.randrange(len(result)) :][: chance.randint(1, 40)]
        elif how == 4:
            del result[at:]
        elif how == 5:
            result[at : at + 4] = struct.pack("<I", chance.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF]))
        elif how == 6:
            result[at : at + 8] = struct.pack("<Q", chance.choice([0, 1 << 62, (1 << 64) - 1]))
        else:
            result += bytes(chance.randrange(256) for _ in range(chance.randint(1, 20)))
    return bytes(result)


def places(tree: Any) -> list[tuple[Any, Any]]:
    """``(container, key)`` of everything inside a JSON value."""
    found, todo = [], [tree]
    while todo:
        node = todo.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                todo.append(node[key])
    return found


def mutate(chance: random.Random, tree: Any) -> None:
    for _ in range(chance.randint(1, 2)):
        node, key = chance.choice(places(tree))
        how = chance.randrange(4)
        if how == 0 and isinstance(node, dict):
            del node[key]
        elif how == 1 and isinstance(node, list):
            node.append(node[key])
        elif how == 2:
            other, place = chance.choice(places(tree))
            node[key] = json.loads(json.dumps(other[place]))
        else:
            node[key] = copy.deepcopy(chance.choice(JUNK))


def named(action: Callable[[], Any]) -> Any:
    """The value, or ``None`` for a named error; every other error is the test's."""
    try:
        return action()
    except CheckpointError as error:
        # What a load raises is a CheckpointError whatever its cause is.
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()]
        for cause in causes:
            if not isinstance(cause, CheckpointError):
                raise cause from None
        return None


@pytest.mark.parametrize("seed", seeds(3, 60))
def test_members_of_a_manifest(good: Path, seed: int) -> None:
    text = (good / "torch_save" / "manifest.json").read_bytes()
    chance = random.Random(seed)
    for _ in range(300):
        members = json.loads(text)
        del members["digest"]
        mutate(chance, members)
        manifest = named(lambda: Manifest.decode(encode(members)))  # noqa: B023
        if manifest is not None:
            assert Manifest.decode(manifest.encode()).names == manifest.names
            is_alias = np.asarray([spec.alias >= 0 for spec in manifest.table.keys], bool)
            tiling_problems(manifest.table, is_alias)


@pytest.mark.parametrize("seed", seeds(2, 40))
@pytest.mark.parametrize("kind", ["torch_save", "safetensors"])
def test_a_load_of_what_a_manifest_says(good: Path, tmp_path: Path, kind: str, seed: int) -> None:
    shutil.copytree(good / kind, tmp_path / "it")
    text = (tmp_path / "it" / "manifest.json").read_bytes()
    chance = random.Random(seed)
    for _ in range(40):
        (tmp_path / "it" / "manifest.json").write_bytes(text)
        if chance.random() < 0.6:
            edit(tmp_path / "it", lambda members: mutate(chance, members))
        else:
            edit_columns(tmp_path / "it", lambda found: mutate_column(chance, found))
        named(lambda: dcp_pipeline.load(state(), checkpoint_id=tmp_path / "it"))
        named(lambda: dcp_pipeline.load_keys(tmp_path / "it"))
        named(lambda: verify(tmp_path / "it", threads=1))


def mutate_column(chance: random.Random, found: dict[str, Any]) -> None:
    name = chance.choice(list(found))
    column = found[name] = found[name].copy()
    place = tuple(chance.randrange(extent) for extent in column.shape)
    value = int(column[place])
    column[place] = chance.choice(
        [0, 1, -1, value + 1, value - 1, 64, 1 << 40, 1 << 62, -(1 << 63)]
    )


@pytest.mark.parametrize("seed", seeds(2, 60))
def test_bytes_of_our_records(good: Path, seed: int) -> None:
    path = good / "torch_save"
    (sums,) = path.glob("*.sums")
    manifest, digests = (path / "manifest.json").read_bytes(), sums.read_bytes()
    packed = pack_columns(columns(json.loads(manifest)))
    chance = random.Random(seed)
    for _ in range(400):
        other = changed(chance, manifest)
        decoded = named(lambda: Manifest.decode(other))  # noqa: B023
        assert decoded is None or other == manifest
        named(lambda: parse_sums(changed(chance, digests)))
        named(lambda: unpack_columns(changed(chance, packed)))


@pytest.mark.parametrize("seed", seeds(2, 60))
def test_bytes_of_plain_dcps_metadata(good: Path, seed: int) -> None:
    data = (good / "plain" / ".metadata").read_bytes()
    sizes = {"__0_0.distcp": (good / "plain" / "__0_0.distcp").stat().st_size}
    chance = random.Random(seed)
    for _ in range(400):
        metadata = named(lambda: read_metadata(changed(chance, data)))
        if metadata is not None:
            named(lambda: manifest_of(metadata, sizes))  # noqa: B023


@pytest.mark.parametrize("seed", seeds(2, 60))
def test_bytes_of_items(good: Path, seed: int) -> None:
    metadata = read_metadata((good / "plain" / ".metadata").read_bytes())
    data = (good / "plain" / "__0_0.distcp").read_bytes()
    chance = random.Random(seed)
    for _ in range(60):
        for info in metadata.storage_data.values():
            item = changed(chance, data[info.offset : info.offset + info.length])
            named(lambda: parse_tensor_zip(lambda at, n: item[at : at + n], len(item)))  # noqa: B023
            if chance.random() < 0.3:
                named(lambda: read_value(item))  # noqa: B023


@pytest.mark.parametrize("seed", seeds(2, 60))
def test_bytes_of_safetensors(good: Path, tmp_path: Path, seed: int) -> None:
    (file,) = (good / "safetensors").glob("*.safetensors")
    data = file.read_bytes()
    chance = random.Random(seed)
    for _ in range(600):
        other = changed(chance, data)
        named(lambda: parse_header(lambda at, n: other[at : at + n], len(other)))  # noqa: B023
    shutil.copytree(good / "safetensors", tmp_path / "it")
    for _ in range(20):
        # With digests that are right, so that what the bytes say is what counts.
        (tmp_path / "it" / file.name).write_bytes(changed(chance, data))
        named(lambda: resum(tmp_path / "it"))
        named(lambda: dcp_pipeline.load(state(), checkpoint_id=tmp_path / "it"))
        named(lambda: dcp_pipeline.load_keys(tmp_path / "it"))
        named(lambda: verify(tmp_path / "it", threads=1))


@pytest.mark.parametrize("seed", seeds(2, 40))
def test_a_load_of_changed_files_of_plain_dcp(good: Path, tmp_path: Path, seed: int) -> None:
    shutil.copytree(good / "plain", tmp_path / "it")
    files = {file: file.read_bytes() for file in (tmp_path / "it").iterdir()}
    template = {name: value for name, value in state().items() if name != "array"}
    chance = random.Random(seed)
    for _ in range(30):
        for file, data in files.items():
            file.write_bytes(data if chance.random() < 0.4 else changed(chance, data))
        named(lambda: dcp_pipeline.load(template, checkpoint_id=tmp_path / "it"))
        named(lambda: dcp_pipeline.load_keys(tmp_path / "it"))
        named(lambda: verify(tmp_path / "it", threads=1))


def test_what_is_changed_is_still_a_zip_sometimes(good: Path) -> None:
    """The fuzz reaches behind the first check: many changed items parse."""
    metadata = read_metadata((good / "plain" / ".metadata").read_bytes())
    data = (good / "plain" / "__0_0.distcp").read_bytes()
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == "w"]
    item = data[info.offset : info.offset + info.length]
    (good / "item.zip").write_bytes(item)
    assert zipfile.is_zipfile(good / "item.zip")
    chance, parsed = random.Random(0), 0
    for _ in range(200):
        other = changed(chance, item)
        read = lambda at, n: other[at : at + n]  # noqa: B023, E731
        parsed += named(lambda: parse_tensor_zip(read, len(other))) is not None  # noqa: B023
    assert 10 < parsed < 190
