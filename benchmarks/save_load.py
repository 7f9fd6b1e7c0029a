"""Save and load beside plain DCP, safetensors and raw I/O, on the same bytes, interleaved.

    python -m benchmarks.save_load [--runs 5] [--quick] [--output FILE]

Everything is synced to disk; ours with checksums, verification and commit on, and with the
fingerprint of the values but for one row, which shows what that costs. Loads go into
tensors that exist, warm (the files are in the page cache) and cold (the kernel was asked to forget
them).
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.common import (
    Result,
    drop_cache,
    interleaved,
    llama_like,
    many_small,
    report,
    total,
    workplace,
)
from dcp_pipeline import Pipeline
from dcp_pipeline.types.memory import bytes_of

State = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the data")
    parser.add_argument("--directory", help="where to write, instead of the temporary directory")
    parser.add_argument("--output", help="write the figures there, as JSON")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    small = many_small(2_000) if options.quick else many_small()
    states = {"300 tensors": llama_like(), "20,000 tensors": small}
    results: list[Result] = []
    with workplace(options.directory) as root:
        for name, state in states.items():
            results += _saves(name, state, root, options.runs)
            results += _loads(name, state, root, options.runs)
    report("Save and load, one process", results, options.output)


def _saves(name: str, state: State, root: Path, runs: int) -> list[Result]:
    one = Pipeline.from_config({"storage": {"kind": "filesystem", "thread_count": 1}})
    two = Pipeline.from_config({})
    bare = Pipeline.from_config({"fingerprint": False})
    tensors = Pipeline.from_config({"serialization": "safetensors"})

    def plain(threads: int) -> Callable[[], object]:
        def run() -> object:
            writer = dcp.FileSystemWriter(root / f"dcp{threads}", thread_count=threads)
            return dcp.save(state, storage_writer=writer, no_dist=True)

        return run

    def safetensors() -> None:
        path = root / "plain.safetensors"
        save_file(state, path)
        _sync(path)

    contenders: dict[str, Callable[[], object]] = {
        "plain DCP, 1 thread": plain(1),
        "plain DCP, 2 threads": plain(2),
        "dcp_pipeline, 1 thread": lambda: one.save(state, root / "one"),
        "dcp_pipeline, 2 threads": lambda: two.save(state, root / "two"),
        "dcp_pipeline, 2 threads, no fingerprint": lambda: bare.save(state, root / "bare"),
        "dcp_pipeline, safetensors": lambda: tensors.save(state, root / "tensors"),
        "safetensors file": safetensors,
        "raw write": lambda: _raw_write(state, root / "raw"),
    }
    measured = interleaved(contenders, runs, between=os.sync)
    return [Result(f"save, {name}", total(state), "plain DCP, 1 thread", measured)]


def _loads(name: str, state: State, root: Path, runs: int) -> list[Result]:
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    none = Pipeline.from_config({"rollback": "none"})
    copy = Pipeline.from_config({})
    twice = Pipeline.from_config({"rollback": "verify_first"})

    def plain() -> object:
        reader = dcp.FileSystemReader(root / "dcp2")
        return dcp.load(target, storage_reader=reader, no_dist=True)

    def safetensors() -> None:
        for key, value in load_file(root / "plain.safetensors").items():
            target[key].copy_(value)

    contenders: dict[str, Callable[[], object]] = {
        "plain DCP": plain,
        "dcp_pipeline, rollback copy": lambda: copy.load(target, root / "two"),
        "dcp_pipeline, rollback verify_first": lambda: twice.load(target, root / "two"),
        "dcp_pipeline, rollback none": lambda: none.load(target, root / "two"),
        "safetensors file": safetensors,
        "raw read": lambda: _raw_read(target, root / "raw"),
    }
    warm = interleaved(contenders, runs)
    for key, value in state.items():
        assert torch.equal(target[key], value), key
    cold = interleaved(contenders, runs, between=lambda: drop_cache(root))
    return [
        Result(f"load warm, {name}", total(state), "plain DCP", warm),
        Result(f"load cold, {name}", total(state), "plain DCP", cold),
    ]


def _raw_write(state: State, path: Path) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    views = [bytes_of(value) for value in state.values()]
    offset = 0
    for start in range(0, len(views), 512):
        part = views[start : start + 512]
        wanted = sum(map(len, part))
        written = os.pwritev(descriptor, part, offset)
        while written < wanted:
            rest = b"".join(part)[written:]
            written += os.pwrite(descriptor, rest, offset + written)
        offset += wanted
    os.fdatasync(descriptor) if hasattr(os, "fdatasync") else os.fsync(descriptor)
    os.close(descriptor)


def _raw_read(target: State, path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    views = [bytes_of(value) for value in target.values()]
    offset = 0
    for start in range(0, len(views), 512):
        part = views[start : start + 512]
        wanted = sum(map(len, part))
        done = os.preadv(descriptor, part, offset)
        for view in part:
            if done >= len(view):
                done -= len(view)
                offset += len(view)
                continue
            # A short read: the rest of this buffer and all behind it, one by one.
            os.preadv(descriptor, [view[done:]], offset + done)
            done = 0
            offset += len(view)
        assert wanted >= 0
    os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


if __name__ == "__main__":
    main()
