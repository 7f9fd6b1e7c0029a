"""Names of keys that a serialization cannot hold are refused before anything is written."""

from pathlib import Path

import pytest
import torch

import dcp_pipeline
from dcp_pipeline.core.errors import UnsupportedLeafError


def test_a_lone_surrogate_is_refused_at_collect(tmp_path: Path) -> None:
    state = {"good": torch.ones(1), "a\ud800": torch.ones(2), "b": {"\udfff": 1}}
    with pytest.raises(
        UnsupportedLeafError, match=r"collect failed.*2 leaves.*surrogate"
    ) as caught:
        dcp_pipeline.save(
            state, checkpoint_id=tmp_path / "new", config={"serialization": "safetensors"}
        )
    assert repr("a\ud800") in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_torch_save_holds_it(tmp_path: Path) -> None:
    dcp_pipeline.save({"a\ud800": torch.ones(2)}, checkpoint_id=tmp_path)
    assert list(dcp_pipeline.load_keys(tmp_path)) == ["a\ud800"]
