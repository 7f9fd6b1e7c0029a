"""The record of a fingerprint: what it depends on, and how it lies in a manifest."""

import base64
import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcp_pipeline.core.contributions import fingerprints_of
from dcp_pipeline.core.crc64 import finished, raw_crc64
from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.fingerprint import (
    Fingerprint,
    decode_fingerprint,
    encode_fingerprint,
    make_fingerprint,
)
from dcp_pipeline.core.framing import frame
from dcp_pipeline.core.manifest import FileEntry, Manifest
from dcp_pipeline.core.path import Index
from dcp_pipeline.core.table import ChunkTable, KeySpec, Kind
from dcp_pipeline.pipelines.steps.save_commit import encode_receipt
from dcp_pipeline.pipelines.values import Receipt
from tests.planning.states import keys_of, sharded

NAMES = ("w", "a.0", "v", "object")
SPECS = (
    KeySpec(("w",), Kind.TENSOR, "float32", (2, 3)),
    KeySpec(("a", Index(0)), Kind.ARRAY, "int8", ()),
    KeySpec(("v",), Kind.VALUE),
    KeySpec(("object",), Kind.VALUE),
)
NUMBERS = (1, 0, 0xFEDCBA9876543210, 0)


def made(names: Any = NAMES, specs: Any = SPECS, numbers: Any = NUMBERS) -> Fingerprint:
    return make_fingerprint(names, specs, numbers)


def test_keys_have_their_own() -> None:
    found = made()
    assert found.tensors == {"w": "0000000000000001", "a.0": "0000000000000000"}
    assert found.values == {"v": "fedcba9876543210", "object": None}
    assert (found.of("w"), found.of("object")) == ("0000000000000001", None)
    with pytest.raises(KeyError):
        found.of("other")


def test_the_whole_is_a_sha256_of_sorted_lines() -> None:
    lines = [
        '[["a",[0]],"array","int8",[],"0000000000000000"]',
        '[["object"],"value",null,null,null]',
        '[["v"],"value",null,null,"fedcba9876543210"]',
        '[["w"],"tensor","float32",[2,3],"0000000000000001"]',
    ]
    assert made().value == hashlib.sha256("\n".join(lines).encode()).hexdigest() == str(made())
    assert make_fingerprint((), (), ()).value == hashlib.sha256(b"").hexdigest()


def test_order_and_names_do_not_matter_but_all_else_does() -> None:
    one = made()
    order = [2, 0, 3, 1]
    other = made(*([row[at] for at in order] for row in (NAMES, SPECS, NUMBERS)))
    assert one == other and hash(one) == hash(other) and len({one, other}) == 1
    assert made(("x#1", *NAMES[1:])).value == one.value
    changed = [
        {"path": ("W",)},
        {"path": (Index(0),)},
        {"kind": Kind.ARRAY},
        {"dtype": "int32"},
        {"shape": (3, 2)},
        {"shape": (6,)},
    ]
    found = {made(specs=(replace(SPECS[0], **change), *SPECS[1:])).value for change in changed}
    found |= {made(numbers=(2, *NUMBERS[1:])).value, made(numbers=(1, 0, 5, 0)).value}
    assert len(found | {one.value}) == len(changed) + 3


def test_a_tensor_is_the_crc_of_its_bytes_and_aliases_are_too() -> None:
    data = bytes(range(24))
    specs = (SPECS[0], replace(SPECS[0], path=("tied",), alias=0), KeySpec(("v",), Kind.VALUE),
             KeySpec(("none",), Kind.TENSOR, "float32", (0, 5)))  # fmt: skip
    table = ChunkTable.build(specs, [0, 0, 2], [(0, 0), (1, 0), ()], [(1, 3), (1, 3), ()])
    first = raw_crc64(data[:12] + bytes(12))
    parts = np.asarray([first, raw_crc64(data[12:]), 77], np.uint64)
    crc = finished(raw_crc64(data), 24)
    assert fingerprints_of(table, parts) == [crc, crc, 77, 0]


def test_it_comes_back() -> None:
    member = encode_fingerprint(made(), NAMES)
    assert list(member) == ["algorithm", "state", "keys"]
    assert decode_fingerprint(json.loads(json.dumps(member)), NAMES, SPECS) == made()
    words = np.frombuffer(base64.b64decode(str(member["keys"])), "<u8")
    assert words.tolist() == list(NUMBERS)
    assert decode_fingerprint(None, NAMES, SPECS) is None
    assert decode_fingerprint({"algorithm": "of later"}, NAMES, SPECS) is None


@pytest.mark.parametrize(
    "change",
    [{"state": "xyz"}, {"state": "A" * 64}, {"state": 5}, {"keys": ""}, {"keys": "AAAA"}],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="fingerprint"):
        decode_fingerprint(encode_fingerprint(made(), NAMES) | change, NAMES, SPECS)


def sample(fingerprint: Fingerprint | None) -> Manifest:
    table = ChunkTable.build(SPECS, [0, 1, 2, 3], [(0, 0), (), (), ()], [(2, 3), (), (), ()])
    table.file[:], table.offset[:], table.length[:], table.payload[:] = 0, [0, 24, 25, 27], [
        24, 1, 2, 2
    ], 0  # fmt: skip
    return Manifest(
        "0" * 32, 1.5e9, 1, "safetensors", "dcp", NAMES, table, (FileEntry("__0_0.x", 29),),
        fingerprint=fingerprint,
    )  # fmt: skip


def test_it_lies_in_the_manifest() -> None:
    assert Manifest.decode(sample(made()).encode()).fingerprint == made()
    bare = sample(None).encode()
    assert b'"fingerprint":null' in bare and Manifest.decode(bare).fingerprint is None


def test_what_a_rank_sends_stays_small() -> None:
    """1,000 sharded tensors: the plan and the receipt together, as the design asks."""
    table = sharded(keys_of({f"layers.{i}.weight": (2048, 64) for i in range(1000)}), 1, 8)
    generator = np.random.default_rng(0)
    places = np.cumsum(table.sizes.prod(axis=1) * 2 + 600)
    receipt = Receipt(
        (FileEntry("__1_0.01234567.distcp", 1 << 40),), None, np.zeros(1000, np.int64), places,
        np.full(1000, 33368), np.full(1000, 512), 0,
        fingerprint=generator.integers(0, 1 << 64, 1000, np.uint64),
    )  # fmt: skip
    with_it = len(frame({}, table.pack())) + len(encode_receipt(receipt))
    without = len(encode_receipt(replace(receipt, fingerprint=None)))
    assert len(encode_receipt(receipt)) - without <= 8010
    assert with_it < 16 << 10
