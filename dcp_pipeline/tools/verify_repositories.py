"""Repositories of MEGA files and of Hugging Face models, as far as they can be verified: by the
format's own checksums, and by the fingerprints that a save of this package has noted.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from dcp_pipeline.core.checksum import crc32
from dcp_pipeline.core.contributions import Contributions, fingerprints_of
from dcp_pipeline.core.errors import CheckpointError
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.runs import Box
from dcp_pipeline.core.spans import Span
from dcp_pipeline.formats.mega import parse_mega
from dcp_pipeline.formats.mega_values import decode_leaf
from dcp_pipeline.formats.spans import check_stored, decode_span
from dcp_pipeline.formats.value_digest import value_digest
from dcp_pipeline.layout.mega_reading import mega_manifest
from dcp_pipeline.storage.base import Directory, Source, file_reader
from dcp_pipeline.tools.opening import huggingface_manifest, linked
from dcp_pipeline.tools.verify_blocks import in_threads
from dcp_pipeline.tools.verify_report import Findings, KeyIndex

__all__ = ["verify_huggingface", "verify_mega"]

_STEP_BYTES = 4 << 20
_SHA256, _CRC32 = "mega.hash.payload.sha256", "mega.hash.payload.crc32"


def verify_mega(directory: Directory, findings: Findings, threads: int) -> Manifest | None:
    """Note everything that is wrong; what the files hold, if their headers can be read."""
    try:
        manifest = mega_manifest(directory)
    except CheckpointError as error:
        findings.add("", error)
        return None
    check = _Check(directory, manifest, findings, _mega_payload)
    check.run(threads)
    for name in manifest.notes.get("mega", {}).get("signatures_not_verified", ()):
        findings.cannot_verify(f"the signature of {name}")
    findings.cannot_verify("headers and the index: the format keeps no digest of them")
    return manifest


def verify_huggingface(directory: Directory, findings: Findings, threads: int) -> Manifest | None:
    """As :func:`verify_mega`, for safetensors; of a ``.bin`` the directory of its zip alone."""
    try:
        manifest = huggingface_manifest(directory)
    except CheckpointError as error:
        findings.add("", error)
        return None
    _Check(linked(directory), manifest, findings, lambda source, findings: None).run(threads)
    findings.cannot_verify("headers and the index: the format keeps no digest of them")
    return manifest


class _Check:
    def __init__(
        self,
        directory: Directory,
        manifest: Manifest,
        findings: Findings,
        payload: Callable[[Source, Findings], None],
    ) -> None:
        self._directory, self._manifest, self._findings = directory, manifest, findings
        self._check_payload = payload
        self._index = KeyIndex(manifest)
        self._words = np.zeros(len(manifest.table), np.uint64)
        self._bad: set[int] = set()
        self._lock = threading.Lock()
        self.unchecked = 0

    def run(self, threads: int) -> None:
        """Everything, by several threads."""
        files = self._manifest.files
        self._findings.total_bytes = sum(entry.size for entry in files)
        in_threads(threads, "verify", self.file, [(number,) for number in range(len(files))])
        self.compare()
        if self.unchecked:
            self._findings.cannot_verify(
                f"the bytes of {self.unchecked} tensors, of which there is neither a checksum nor a"
                " fingerprint"
            )

    def file(self, number: int) -> None:
        """Everything in one file."""
        entry = self._manifest.files[number]
        try:
            with self._directory.open(entry.name) as source:
                for row in self._index.rows(number):
                    self._row(number, row, source)
                self._check_payload(source, self._findings)
        except CheckpointError as error:
            self._findings.add(entry.name, error)
        self._findings.count_file()

    def _row(self, file: int, row: int, source: Source) -> None:
        table, name = self._manifest.table, self._manifest.files[file].name
        keys = self._index.names(row)
        try:
            if table.keys[table.key[row]].dtype is None:
                data = file_reader(source)(int(table.offset[row]), int(table.length[row]))
                word = np.uint64(value_digest(decode_leaf(data)) % (1 << 64))
            else:
                word = self._tensor(row, source, f"{name}, {keys[0]}")
        except CheckpointError as error:
            self._findings.add(name, error, "", keys)
            with self._lock:
                self._bad.add(int(table.key[row]))
            return
        with self._lock:
            self._words[row] = word

    def _tensor(self, row: int, source: Source, name: str) -> np.uint64:
        """What a chunk adds to the fingerprint of its key."""
        table, manifest = self._manifest.table, self._manifest
        spec, (offsets, sizes) = table.keys[table.key[row]], table.boxes(row)
        nbytes = int(table.nbytes[row])
        spans = manifest.encoded.get(row)
        if manifest.fingerprint is None and not (spans and all(span.checksum for span in spans)):
            with self._lock:
                self.unchecked += 1
        box = Box(spec.shape, offsets, sizes, spec.item_size)
        taken = Contributions([0], [nbytes], lambda _: box)
        whole = (Span(int(table.offset[row]), nbytes, 0, nbytes),)
        for span in spans or whole:
            for begin, data in self._elements(span, source, name):
                if manifest.fingerprint is not None:
                    taken.add(begin, data)
        return np.uint64(taken.result()[0][0])

    def _elements(self, span: Span, source: Source, name: str) -> Iterator[tuple[int, memoryview]]:
        """The elements of a span, in steps where they can be looked at one by one."""
        is_plain = span.is_plain and not span.checksum
        step = _STEP_BYTES if is_plain else max(span.stored, 1)
        buffer = bytearray(min(step, span.stored))
        for at in range(0, span.stored, step):
            view = memoryview(buffer)[: min(step, span.stored - at)]
            source.read_into(span.offset + at, view)
            self._findings.count(len(view))
            if is_plain:
                yield span.begin + at, view
            else:
                check_stored(span, view, name)
                yield span.begin, decode_span(span, view, name)

    def compare(self) -> None:
        """Compare all keys with the fingerprints that were noted, if any were."""
        manifest = self._manifest
        recorded = manifest.fingerprint
        if recorded is None:
            return
        numbers = fingerprints_of(manifest.table, self._words)
        for key, (name, spec) in enumerate(zip(manifest.names, manifest.table.keys, strict=True)):
            source = key if spec.alias < 0 else spec.alias
            wanted = recorded.of(name)
            if source not in self._bad and wanted not in (None, f"{numbers[key]:016x}"):
                rows = np.flatnonzero(manifest.table.key == source)
                file = manifest.files[int(manifest.table.file[rows[0]])].name if len(rows) else ""
                self._findings.add(
                    file,
                    f"values have the fingerprint {numbers[key]:016x}: they are not those that were"
                    " saved",
                    f"{wanted}, as was noted when they were",
                    (name,),
                )


def _mega_payload(source: Source, findings: Findings) -> None:
    """Compare a digest of all payloads, which signed files have."""
    file = parse_mega(file_reader(source), source.size)
    wanted = {key: file.metadata[key].value for key in (_SHA256, _CRC32) if key in file.metadata}
    if not wanted:
        return
    sha, crc = hashlib.sha256(), 0
    for at in range(file.data_start, file.data_end, _STEP_BYTES):
        data = file_reader(source)(at, min(_STEP_BYTES, file.data_end - at))
        sha.update(data)
        crc = crc32(data, crc)
    found = {_SHA256: (sha.hexdigest(),), _CRC32: (crc, f"{crc:08x}", str(crc))}
    for key, value in wanted.items():
        given = value.lower() if isinstance(value, str) else value
        if given not in found[key]:
            findings.add(source.name, f"its payload has {found[key][-1]}", f"{key} {value}")
