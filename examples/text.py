"""Real text that every machine has: this project's documentation and Python's own sources."""

import sysconfig
from pathlib import Path

import torch

PROJECT = Path(__file__).resolve().parents[1]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


class Text:
    """Batches of bytes that depend on the seed, the step and the batch size alone.

    Any number of ranks sees the same sequences at the same step, and each rank takes its share: a
    run on another number of ranks can be compared, and a resumed run needs no reader's state.
    """

    def __init__(self, batch: int, context: int, seed: int) -> None:
        documents = sorted([*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md")])
        files = [*documents, *sorted(STANDARD_LIBRARY.glob("*.py"))]
        joined = b"\n".join(file.read_bytes() for file in files)
        self._bytes = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
        self._batch = batch
        self._length = context + 1  # inputs and targets are the same bytes, one apart
        self._seed = seed

    def share(self, step: int, rank: int, world_size: int) -> torch.Tensor:
        """This rank's sequences of a step, ``[batch / world_size, context + 1]``, int64."""
        if self._batch % world_size:
            raise ValueError(f"a batch of {self._batch} cannot be shared by {world_size} ranks")
        random = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        last = len(self._bytes) - self._length
        begins = torch.randint(last, (self._batch,), generator=random)
        mine = begins.chunk(world_size)[rank]
        return torch.stack([self._bytes[b : b + self._length] for b in mine.tolist()]).long()
