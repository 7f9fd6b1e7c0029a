"""``*.sums``: the digests of every block of one rank's data files.

Layout: ``DCPSUMS1``, ``u32`` length, a JSON object ``{"algorithm", "block_bytes", "files": [[name,
size], ...]}``, then the digests of the files' blocks, file after file. The last block of a file
may be shorter than ``block_bytes``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dcp_pipeline.core.checksum import MAX_BLOCK_BYTES, block_digests, digest_of, digest_size
from dcp_pipeline.core.errors import FormatError
from dcp_pipeline.core.manifest import safe_name

__all__ = ["BlockSums", "encode_sums", "parse_sums"]

MAGIC: Final = b"DCPSUMS1"


@dataclass(frozen=True, slots=True)
class BlockSums:
    """The block digests of one data file.

    Attributes:
        name, size: the file they are of.
        algorithm: a name of ``core.checksum.ALGORITHMS``.
        block_bytes: bytes per block.
        digests: of all blocks, joined.
    """

    name: str
    size: int
    algorithm: str
    block_bytes: int
    digests: bytes

    def first_difference(self, data: memoryview, first_block: int) -> int | None:
        """The first block of ``data`` that is not what was written, or ``None``.

        Args:
            data: whole blocks of the file, from ``first_block`` on.
        """
        width = digest_size(self.algorithm)
        found = block_digests(self.algorithm, data, self.block_bytes)
        wanted = self.digests[first_block * width : first_block * width + len(found)]
        if found == wanted:
            return None
        for block in range(len(found) // width):
            if found[block * width : block * width + width] != wanted[block * width :][:width]:
                return first_block + block
        return first_block + len(wanted) // width


def encode_sums(sums: Sequence[BlockSums], algorithm: str, block_bytes: int) -> bytes:
    """The bytes of a sums file over ``sums``, all of one algorithm and block size."""
    files = [[entry.name, entry.size] for entry in sums]
    header = json.dumps(
        {"algorithm": algorithm, "block_bytes": block_bytes, "files": files}, separators=(",", ":")
    ).encode()
    digests = [entry.digests for entry in sums]
    return b"".join([MAGIC, struct.pack("<I", len(header)), header, *digests])


def parse_sums(data: bytes) -> dict[str, BlockSums]:
    """The digests of every file that a sums file covers, by file name.

    Raises:
        FormatError: not a sums file, or its length does not fit its header.
    """
    try:
        if data[:8] != MAGIC:
            raise FormatError(f"a sums file starts with {MAGIC!r}, found {data[:8]!r}")
        (length,) = struct.unpack_from("<I", data, 8)
        header = json.loads(data[12 : 12 + length])
        algorithm, block_bytes = header["algorithm"], header["block_bytes"]
        width = digest_size(algorithm)
        if type(block_bytes) is not int or not 1 <= block_bytes <= MAX_BLOCK_BYTES:
            raise FormatError(f"a sums file has blocks of {block_bytes!r} bytes")
        position = 12 + length
        result = {}
        for name, size in header["files"]:
            span = -(-size // block_bytes) * width
            digests = data[position : position + span]
            if name in result:
                raise FormatError(f"a sums file covers {name!r} twice")
            if size < 0 or len(digests) != span:
                raise FormatError(f"a sums file is cut off within the digests of {name!r}")
            result[safe_name(name)] = BlockSums(name, size, algorithm, block_bytes, digests)
            position += span
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"a sums file is damaged: {error}") from error
    if position != len(data):
        raise FormatError(f"a sums file has {len(data) - position} bytes too many")
    return result


def sums_digest(algorithm: str, data: bytes) -> str:
    """The digest of a whole sums file, as the manifest records it."""
    return digest_of(algorithm, data).hex()
