"""What a conversion keeps: what values mean, precision, ties, its budget; options that fit."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dcp_pipeline as dcp
from dcp_pipeline.core.errors import ChecksumError, ConfigError, RuleError
from dcp_pipeline.serialization import mega_packing
from dcp_pipeline.tools import convert_check, convert_source
from dcp_pipeline.tools.convert import convert
from tests.distributed.pool import Pool

VALUES: list[Any] = [3, "x", 0.1, None, [1, 2], {1: 2}, [], (1, "a"), b"ab", True]


def nested() -> dict[str, Any]:
    return {
        "w": torch.ones(3),
        "list": [torch.arange(2)],
        **dict(zip("abcdefghij", VALUES, strict=True)),
    }


@pytest.mark.parametrize("serialization", ["torch_save", "safetensors", "mega"])
def test_values_keep_their_fingerprint(tmp_path: Path, serialization: str) -> None:
    for record in (True, False):
        config = {"serialization": serialization, "fingerprint": record}
        dcp.save(nested(), checkpoint_id=tmp_path / "source", config=config)
        source = tmp_path / "source"
        for to in ("dcp", "mega", "dcp"):
            done = convert(source, tmp_path / f"{to}-{source.name}", to=to)
            assert done.fingerprint == str(dcp.fingerprint(nested()))
            source = Path(done.target)
        assert dcp.fingerprint(dcp.load_keys(source)) == dcp.fingerprint(nested())


def test_a_value_that_was_written_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dcp.save({"w": torch.ones(2), "step": 3, "note": "x"}, checkpoint_id=tmp_path / "a")
    monkeypatch.setattr(convert_check, "value_digest", lambda value: 1 if value == 3 else 0)
    with pytest.raises(ChecksumError, match="'step' was not written as it was read"):
        convert(tmp_path / "a", tmp_path / "b", to="mega")


@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("held", ["float32", "float64", "bfloat16"])
def test_an_average_is_rounded_once(tmp_path: Path, held: str, to: str) -> None:
    torch.manual_seed(1)
    parts = [(torch.randn(50, 4) * 10**k).to(getattr(torch, held)) for k in range(3)]
    for number, part in enumerate(parts):
        dcp.save({"w": part}, checkpoint_id=tmp_path / str(number))
    shares = [0.5, 0.25, 0.25]
    sources = [tmp_path / str(number) for number in range(3)]
    convert(sources, tmp_path / "mean", to="dcp", weights=shares, dtype=to)
    wide = torch.float64 if held == "float64" else torch.float32
    total = torch.zeros(50, 4, dtype=wide)
    for share, part in zip(shares, parts, strict=True):
        total.add_(part.to(wide), alpha=share)
    found = dcp.load_keys(tmp_path / "mean")["w"]
    assert torch.equal(found.float(), total.to(getattr(torch, to)).float())


def test_an_average_of_what_does_not_fit(tmp_path: Path) -> None:
    for number, value in enumerate((1e5, -99999.0)):
        given = {"w": torch.tensor([value, 1e5])}
        dcp.save(given, checkpoint_id=tmp_path / str(number))
    sources = [tmp_path / "0", tmp_path / "1"]
    done = convert(sources, tmp_path / "mean", to="dcp", dtype="float16")
    assert dcp.load_keys(tmp_path / "mean")["w"].tolist() == [0.5, float("inf")]
    assert done.casts == {"w": 1}


def test_an_average_takes_small_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(7, 5, 3), torch.randn(7, 5, 3)]
    for number, part in enumerate(parts):
        dcp.save({"w": part, "s": part[0, 0, 0].clone()}, checkpoint_id=tmp_path / str(number))
    sizes: list[int] = []
    zeros = torch.zeros

    def counted(shape: Any, **others: Any) -> torch.Tensor:
        made = zeros(shape, **others)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(convert_source, "_STEP_ELEMENTS", 4)
    monkeypatch.setattr(convert_source.torch, "zeros", counted)
    flip = {"transforms": [{"kind": "transpose", "keys": ["w"]}, {"kind": "keep", "keys": ["*"]}]}
    convert([tmp_path / "0", tmp_path / "1"], tmp_path / "mean", config=flip, check=False)
    assert max(sizes) <= 4 and sum(sizes) == 7 * 5 * 3 + 1
    found = dcp.load_keys(tmp_path / "mean")
    assert torch.equal(found["w"], (parts[0] * 0.5 + parts[1] * 0.5).permute(2, 1, 0))


@pytest.mark.parametrize("kind", ["huggingface", "mega"])
def test_ties_are_written_when_asked_for(tmp_path: Path, kind: str) -> None:
    tied = torch.randn(5, 3)
    dcp.save({"embed": tied, "head": tied}, checkpoint_id=tmp_path / "a")
    serialization = {"huggingface": "safetensors", "mega": "mega"}[kind]
    layout = {"kind": kind, "tied": "write"}
    config = {"layout": layout, "serialization": serialization}
    done = convert(tmp_path / "a", tmp_path / "b", config=config)
    found = dcp.load_keys(tmp_path / "b", config={"layout": kind})
    assert done.nbytes == 2 * tied.nbytes and done.is_checked
    assert torch.equal(found["embed"], tied) and torch.equal(found["head"], tied)
    assert found["embed"].data_ptr() != found["head"].data_ptr()
    if kind == "huggingface":
        assert load_file(tmp_path / "b/model.safetensors").keys() == {"embed", "head"}


def test_what_is_compressed_is_kept_within_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    add = mega_packing.Kept.add

    def counted(self: Any, offset: int, packed: bytes) -> None:
        add(self, offset, packed)
        kept.append(self.nbytes)

    monkeypatch.setattr(mega_packing.Kept, "add", counted)
    given = {str(n): torch.randn(3 << 20).bfloat16() for n in range(16)}  # 96 MiB
    dcp.save(given, checkpoint_id=tmp_path / "a")
    packed = {"kind": "mega", "compression": "zstd", "level": 1, "chunk_bytes": "1MiB"}
    packed |= {"checksum": "none"}
    config = {"layout": "mega", "serialization": packed}
    convert(tmp_path / "a", tmp_path / "b", config=config, memory="128MiB", check=False)
    # Of 64 MiB for each thread, 48 are for what is read and written.
    assert 0 < max(kept) <= 8 << 20
    found = dcp.load_keys(tmp_path / "b", config={"layout": "mega"})
    assert all(torch.equal(found[name], given[name]) for name in given)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    convert(tmp_path / "a", tmp_path / "m", to="mega")
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("a", {"source_options": {"dequantize": "bfloat16"}}, "'dcp'.*dequantize"),
        ("m", {"source_options": {"dequantize": "bfloat16"}}, "'mega'.*dequantize"),
        ("one.safetensors", {"source_options": {"dequantize": "bfloat16"}}, "single file"),
        ("m/model.mega", {"source_options": {"verify": False}}, "single file"),
        ("a", {"dtype": "int64"}, "dtype 'int64'"),
        ("a", {"dtype": "bool"}, "dtype 'bool'"),
        ("a", {"dtype": "complex64"}, "dtype 'complex64'"),
        ("a", {"weights": [float("nan")]}, "finite"),
        ("a", {"weights": [float("inf")]}, "finite"),
    ]
    for source, arguments, words in wrong:
        with pytest.raises(ConfigError, match=words):
            convert(tmp_path / source, tmp_path / "b", to="dcp", **arguments)
    with pytest.raises(ConfigError, match=r"'huggingface'.*dequantize"):
        one = {"source_options": {"dequantize": "int8"}, "source_kind": "huggingface"}
        (tmp_path / "r").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / "r/model.safetensors")
        convert(tmp_path / "r", tmp_path / "b", to="dcp", **one)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_number_far_away_takes_no_memory(tmp_path: Path, reverse: bool) -> None:
    given = {f"ex.{n}.w": torch.ones(1) for n in (0, 1, 999_999_999)}
    dcp.save(given, checkpoint_id=tmp_path / "a")
    here, there = ("all", "ex.{e}.w") if reverse else ("ex.{e}.w", "all")
    rule = {"kind": "unstack" if reverse else "stack", "over": "e", "from": here, "to": there}
    tracemalloc.start()
    with pytest.raises(RuleError, match="lacks e = 2, 3, 4, 5, 6, 7, 8, 9"):
        convert(tmp_path / "a", tmp_path / "b", config={"transforms": [rule]}, reverse=reverse)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_the_format_of_a_file_is_no_tie(tmp_path: Path) -> None:
    huggingface = {"layout": "huggingface"}
    for names in (["pt"], ["pt", "format"], ["pt", "w"]):
        dcp.save(
            {name: torch.ones(2) for name in names},
            checkpoint_id=tmp_path / "-".join(names),
            config=huggingface,
        )
        found = dcp.load_keys(tmp_path / "-".join(names), config=huggingface)
        assert sorted(found) == sorted(names)
    header = (tmp_path / "pt/model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert json.loads(header[8 : 8 + length])["__metadata__"]["format"] == "pt"


def _one_rank_fails(path: Path, where: str) -> list[str]:
    """A conversion in which the last of the ranks cannot read, before or after it is written."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dcp.save({f"w{n}": torch.ones(3) for n in range(4)} | {"step": 3}, checkpoint_id=path / "a")
    found = []
    with pytest.MonkeyPatch.context() as patched:
        if rank == size - 1:
            patched.setattr(*_BROKEN[where])
        for to in ("dcp", "mega", "torch_save"):
            target = path / (f"{to}.pt" if to == "torch_save" else to)
            try:
                convert(path / "a", target, to=to)
            except OSError as error:
                found.append(str(error))
    return found


def _unreadable(*_: Any, **__: Any) -> Any:
    raise OSError("the disk of one rank")


_BROKEN: dict[str, tuple[Any, str, Any]] = {
    "values": (convert_source.Sources, "value", _unreadable),
    "check": (convert_check, "tensor_fingerprints", _unreadable),
    "check of values": (convert_check, "_value_fingerprints", _unreadable),
}


@pytest.mark.parametrize("where", _BROKEN)
def test_all_ranks_hear_that_one_cannot_read(ranks: Pool, tmp_path: Path, where: str) -> None:
    for found in ranks(2).run(_one_rank_fails, tmp_path, where):
        assert len(found) == 3
        assert all("rank 1" in words and "the disk of one rank" in words for words in found)
    if where == "values":
        kept = [p.name for p in tmp_path.rglob("*") if p.name in ("manifest.json", "model.mega")]
        assert kept == ["manifest.json"] and not (tmp_path / "torch_save.pt").exists()
