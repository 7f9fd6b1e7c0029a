"""What cannot be stored is said in a sentence."""

import collections
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline.core.errors import UnsupportedLeafError
from dcp_pipeline.pipeline import Pipeline

TOO_DEEP: frozenset[Any] = frozenset()
for _ in range(300):
    TOO_DEEP = frozenset([TOO_DEEP])


@pytest.mark.parametrize(
    ("serialization", "value", "said"),
    [
        (
            "torch_save",
            collections.deque([1]),
            "'a.b' is a collections.deque, which would not be read back: an item asks for "
            "collections.deque, which is not allowed",
        ),
        ("torch_save", lambda: 0, "'a.b' is a function, which cannot be saved: "),
        (
            "safetensors",
            collections.deque([1]),
            "'a.b' is a collections.deque, which cannot be written as typed JSON",
        ),
        (
            "safetensors",
            object(),
            "'a.b' is a object, which cannot be written as typed JSON",
        ),
        ("safetensors", TOO_DEEP, "'a.b' is a value that is nested more than "),
    ],
)
def test_what_cannot_be_stored(
    tmp_path: Path, serialization: str, value: object, said: str
) -> None:
    with Pipeline.from_config({"serialization": serialization}) as pipeline:
        with pytest.raises(UnsupportedLeafError) as caught:
            pipeline.save({"a": {"b": value}, "w": torch.ones(2)}, tmp_path / "one")
    text = str(caught.value)
    assert f"1 leaves of the state cannot be stored: {said}" in text
    assert not (tmp_path / "one" / "manifest.json").exists()
