"""MEGA repositories, and manifests with encoded chunks, that something was changed in."""

import base64
import json
import random
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp_pipeline
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.packing import pack_columns
from dcp_pipeline.core.spans import Span, encode_spans
from dcp_pipeline.tools.verify import verify
from tests.corruption.forge import edit
from tests.corruption.test_fuzz import JUNK, changed, mutate, seeds

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MEGA = {"kind": "mega", "compression": "zstd", "shuffle": True, "chunk_bytes": "64KiB"}


def state() -> dict[str, Any]:
    return {
        "w": torch.arange(40_000, dtype=torch.int64).view(200, 200),
        "list": [torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)],
        "settings": {"lr": 0.5, "names": ("x", {1: b"y"})},
        "empty": {},
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    for layout in ("mega", "dcp"):
        config = {"layout": layout, "serialization": MEGA}
        dcp_pipeline.save(state(), checkpoint_id=folder / layout, config=config)
    part = folder / "shards"
    shutil.copytree(folder / "mega", part)
    (part / "model.mega").rename(part / "model-00001-of-00001.mega")
    index = {
        "weight_map": dict.fromkeys(["w", "list.0", "list.1"], "model-00001-of-00001.mega"),
        "metadata": {"dcp_pipeline.state": {"keys": [], "empty": []}},
    }
    (part / "model.mega.index.json").write_text(json.dumps(index))
    return folder


def look(path: Path, layout: str) -> None:
    """Load and verify; only errors with names may come out."""
    try:
        dcp_pipeline.load_keys(path, config={"layout": layout, "serialization": "mega"})
    except CheckpointError as error:
        for cause, _ in getattr(error, "failures", {}).values():
            assert isinstance(cause, CheckpointError), repr(cause)
    try:
        verify(path)
    except CheckpointError:
        pass


@pytest.mark.parametrize("seed", seeds(12, 400))
@pytest.mark.parametrize("kind", ["mega", "shards"])
def test_repositories(good: Path, tmp_path: Path, kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    shutil.copytree(good / kind, tmp_path / "x")
    path = chance.choice(sorted((tmp_path / "x").iterdir()))
    data = path.read_bytes()
    if path.suffix == ".json" and chance.random() < 0.7:
        tree = json.loads(data)
        mutate(chance, tree)
        path.write_text(json.dumps(tree))
    else:
        # Most of a file are elements, of which nothing is to be said but that they are damaged.
        cut = chance.choice([900, len(data)])
        path.write_bytes(changed(chance, data[:cut]) + data[cut:])
    tracemalloc.start()
    try:
        look(tmp_path / "x", "mega")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def member() -> Any:
    spans = {0: (Span(0, 8, 0, 8), Span(8, 8, 8, 8, "zstd", 4, "crc32", b"1234")), 3: ()}
    return encode_spans(spans)


@pytest.mark.parametrize("seed", seeds(25, 600))
def test_encoded_rows_of_manifests(good: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    shutil.copytree(good / "dcp", tmp_path / "x")

    def change(members: dict[str, Any]) -> None:
        if chance.random() < 0.3:
            members["encoded"] = chance.choice([*JUNK, member(), {}, {"rows": [], "packed": ""}])
        else:
            mutate(chance, members["encoded"])

    edit(tmp_path / "x", change)
    look(tmp_path / "x", "dcp")


@pytest.mark.parametrize(
    "spans",
    [
        {0: (Span(0, 1 << 50, 0, 320_000),)},
        {0: (Span(-5, 320_000, 0, 320_000),)},
        {0: (Span(0, 4, 0, 320_000, "zstd"),)},
        {0: (Span(0, 320_000, 0, 320_000, "raw", 7),)},
        {0: ()},
        {-1: (Span(0, 4, 0, 4),)},
        {99: (Span(0, 4, 0, 4),)},
    ],
)
def test_spans_that_contradict_the_table_are_refused(
    good: Path, tmp_path: Path, spans: dict[int, tuple[Span, ...]]
) -> None:
    shutil.copytree(good / "dcp", tmp_path / "x")
    edit(tmp_path / "x", lambda members: members.update(encoded=encode_spans(spans)))
    with pytest.raises(CheckpointError):
        Manifest.decode((tmp_path / "x" / "manifest.json").read_bytes())


def test_columns_of_other_lengths_are_refused(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "dcp", tmp_path / "x")
    columns = {name: np.zeros(2, np.int64) for name in ("row", "offset", "stored")}
    packed = base64.b64encode(pack_columns(columns)).decode()
    bad = {"rows": [], "packed": packed, "digests": ""}
    edit(tmp_path / "x", lambda members: members.update(encoded=bad))
    with pytest.raises(CheckpointError):
        Manifest.decode((tmp_path / "x" / "manifest.json").read_bytes())
