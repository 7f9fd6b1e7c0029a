"""Load semantics: T58, and U12 of the counted faults. No dtype is changed unless it is declared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_pipeline.core.errors import DtypeMismatchError
from tests.cases.jobs import pipeline_of
from tests.equal import assert_same

CASTS = [
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", "float64"),
    ("float32", "uint8"),
    ("float32", "int64"),
    ("int64", "int32"),
    ("int64", "float32"),
    ("int32", "bool"),
    ("uint8", "int8"),
    ("complex64", "float32"),
    ("float16", "float8_e4m3fn"),
]


def of(dtype: str, values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=getattr(torch, dtype))


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_t58_u12_another_dtype_is_refused_unless_declared(
    tmp_path: Path, source: str, target: str
) -> None:
    stored = of(source, [0, 1, 1])
    with pipeline_of() as pipeline:
        pipeline.save({"w": stored}, tmp_path)
        template = {"w": of(target, [0, 0, 0])}
        with pytest.raises(DtypeMismatchError) as caught:
            pipeline.load(template, tmp_path)
        assert [tuple(entry) for entry in caught.value.dtypes] == [("w", source, target)]
        assert_same(template, {"w": of(target, [0, 0, 0])})
    for cast in ("*", {"keys": "w", "source": source, "target": target, "on_overflow": "error"}):
        with pipeline_of({"casts": [cast]}) as pipeline:
            template = {"w": of(target, [0, 0, 0])}
            report = pipeline.load(template, tmp_path)
        real = stored.real if stored.is_complex() else stored
        assert_same(template, {"w": real.to(getattr(torch, target))})
        (record,) = report.casts
        assert (record.key, record.source, record.target) == ("w", source, target)
        assert record.overflowed == 0


@pytest.mark.parametrize(
    ("source", "values", "target", "lost"),
    [
        ("float32", [1e6, 1.0, -1e6], "float16", 2),
        ("float32", [float("inf"), 1.0, float("nan")], "float16", 0),
        ("float64", [1e300, 1e30], "float32", 1),
        ("float32", [256.0, -1.0, 255.5, float("nan")], "uint8", 3),
        ("int64", [1 << 40, 3], "int32", 1),
        ("int16", [-1, 200, 256], "uint8", 2),
        ("int32", [0, 1, 2], "bool", 1),
        ("complex64", [1 + 2j, 3 + 0j], "float32", 1),
        ("uint64", [1 << 40, 1], "int32", 1),
    ],
)
def test_u12_a_declared_cast_that_overflows_is_reported_or_refused(
    tmp_path: Path, source: str, values: list[Any], target: str, lost: int
) -> None:
    declared = {"keys": "*", "on_overflow": "report"}
    with pipeline_of({"casts": [declared]}) as pipeline:
        pipeline.save({"w": of(source, values)}, tmp_path)
        template = {"w": of(target, [0] * len(values))}
        assert pipeline.load(template, tmp_path).casts[0].overflowed == lost
    with pipeline_of({"casts": [declared | {"on_overflow": "error"}]}) as pipeline:
        template = {"w": of(target, [1] * len(values))}
        if not lost:
            pipeline.load(template, tmp_path)
            return
        with pytest.raises(DtypeMismatchError, match=f"{lost} elements of w"):
            pipeline.load(template, tmp_path)
        assert_same(template, {"w": of(target, [1] * len(values))})


def test_a_cast_is_for_the_keys_and_dtypes_that_it_names(tmp_path: Path) -> None:
    casts = [{"keys": "model.*", "source": "float32", "target": "bfloat16"}]
    with pipeline_of({"casts": casts}) as pipeline:
        pipeline.save({"model": {"w": torch.ones(2)}, "other": {"w": torch.ones(2)}}, tmp_path)
        fine = {"model": {"w": torch.zeros(2).bfloat16()}, "other": {"w": torch.zeros(2)}}
        pipeline.load(fine, tmp_path)
        for section, dtype in (("other", torch.bfloat16), ("model", torch.float16)):
            template = {"model": {"w": torch.zeros(2)}, "other": {"w": torch.zeros(2)}}
            template[section]["w"] = torch.zeros(2, dtype=dtype)
            with pytest.raises(DtypeMismatchError, match=rf"{section}\.w"):
                pipeline.load(template, tmp_path)
