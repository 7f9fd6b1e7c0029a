"""Nodes ``open`` and ``agree`` of the load: one checkpoint, and every difference in one error."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_pipeline.core.errors import (
    DisagreementError,
    DtypeMismatchError,
    LoadMismatchError,
    MissingKeyError,
    RulesMismatchError,
    ShapeMismatchError,
    UnexpectedKeyError,
    WorldSizeMismatchError,
    list_some,
)
from dcp_pipeline.core.framing import frame, unframe
from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.pipelines.steps.load_plan import is_wanted
from dcp_pipeline.pipelines.steps.save_agree import same_everywhere
from dcp_pipeline.state.flatten import FlatState
from dcp_pipeline.state.match import Match
from dcp_pipeline.state.rank_local import parse_rank_key

__all__ = ["Differences", "agree", "open_checkpoint"]

logger = logging.getLogger("dcp_pipeline")

Triple = tuple[str, object, object]


@dataclass(frozen=True)
class Differences:
    """What the template and the checkpoint do not share, over all ranks.

    Attributes:
        missing, unexpected, shapes, dtypes: as in :class:`LoadMismatchError`.
        not_requested: keys in top-level sections that no rank's template has.
        resized: per-rank values that another number of ranks has saved: key, ranks then and now.
    """

    missing: list[str]
    unexpected: list[str]
    shapes: list[Triple]
    dtypes: list[Triple]
    not_requested: list[str]
    resized: list[Triple]


def open_checkpoint(job: LoadJob, failure: BaseException | None) -> Manifest:
    """The commit record, read by the coordinator alone and handed to every rank."""
    opened: list[Manifest] = []

    def read(messages: list[bytes]) -> list[bytes]:
        same_everywhere([unframe(message)[0] for message in messages])
        opened.append(job.parts.layout.open(job.directory))
        return [b""] * job.coordinator.world_size

    header = {"checkpoint_id": job.directory.location, "config": job.parts.config.digest()}
    job.coordinator.exchange("open", failure or frame(header), read)
    if job.coordinator.world_size == 1:
        job.manifest = opened[0]
    else:
        data = job.coordinator.broadcast("open", opened[0].encode() if opened else None)
        job.manifest = opened[0] if opened else Manifest.decode(data)
    return job.manifest


def agree(
    template: FlatState | None,
    match: Match | None,
    manifest: Manifest | None,
    job: LoadJob,
    failure: BaseException | None,
) -> Differences:
    """Gather what does not fit on any rank; raise it all together where the config is strict."""
    message: bytes | BaseException
    if failure is not None or match is None or template is None or manifest is None:
        message = failure or RuntimeError("there is no plan")
    else:
        used = np.zeros(len(job.keys_of(manifest).names), bool)
        used[list(match.used)] = True
        header = {
            "problems": match.problems,
            "missing": match.missing,
            "shapes": match.shapes,
            "dtypes": match.dtypes,
            "notes": match.notes,
            "resized": [[one.name, one.saved, one.wanted, one.rule] for one in match.resized],
            "sections": sorted({str(path[0]) for path in _paths(template) if path}),
        }
        message = frame(header, np.packbits(used).tobytes())
    answer = job.coordinator.exchange("agree", message, lambda messages: _compare(messages, job))
    header, _ = unframe(answer)
    if header["not_requested"] and job.coordinator.is_coordinator:
        sections = sorted({name.split(".")[0] for name in header["not_requested"]})
        logger.warning(
            "%s also holds the sections %s, which were not asked for",
            job.directory.location,
            ", ".join(sections),
        )
    return Differences(
        header["missing"],
        header["unexpected"],
        [_triple(entry) for entry in header["shapes"]],
        [_triple(entry) for entry in header["dtypes"]],
        header["not_requested"],
        [_triple(entry) for entry in header["resized"]],
    )


def _paths(template: FlatState) -> list[Any]:
    return [leaf.path for leaf in template.leaves] + [path for path, _ in template.empty]


def _triple(entry: list[object]) -> Triple:
    return str(entry[0]), entry[1], entry[2]


def _compare(messages: list[bytes], job: LoadJob) -> list[bytes]:
    """On the coordinator: the differences of all ranks together."""
    assert job.manifest is not None
    manifest = job.keys_of(job.manifest)
    unframed = [unframe(message) for message in messages]
    headers = [header for header, _ in unframed]
    used = np.zeros(len(manifest.names), bool)
    for _, (bits,) in unframed:
        used |= np.unpackbits(np.frombuffer(bits, np.uint8), count=len(used)).astype(bool)
    sections = {section for header in headers for section in header["sections"]}
    rules, resized = _rules(headers), _union(headers, "resized")
    unexpected: list[str] = []
    not_requested: list[str] = []
    for key in np.flatnonzero(~used):
        name, path = manifest.names[key], manifest.table.keys[key].path
        if not is_wanted(name, job):
            continue
        is_in_other_section = len(path) > 1 and str(path[0]) not in sections
        (not_requested if is_in_other_section else unexpected).append(name)
    differences = Differences(
        _union(headers, "missing"),
        unexpected,
        [_triple(entry) for entry in _union(headers, "shapes")],
        [_triple(entry) for entry in _union(headers, "dtypes")],
        not_requested,
        [_triple(entry) for entry in resized],
    )
    notes = {name: note for header in headers for name, note in header["notes"].items()}
    _raise_if_strict(differences, rules, notes, _union(headers, "problems"), job)
    _warn_of_resizing(rules, differences, job)
    answer = frame(vars(differences))
    return [answer] * len(messages)


def _rules(headers: list[dict[str, Any]]) -> dict[str, str]:
    """What each resized key declares, on all ranks alike.

    Raises:
        DisagreementError: ranks declare different things.
    """
    ranks: dict[str, dict[str, list[int]]] = {}
    for rank, header in enumerate(headers):
        for name, _, _, rule in header["resized"]:
            ranks.setdefault(name, {}).setdefault(rule, []).append(rank)
    different = [
        f"{name} ({'; '.join(f'{rule} on ranks {who}' for rule, who in rules.items())})"
        for name, rules in ranks.items()
        if len(rules) > 1
    ]
    if different:
        raise DisagreementError(
            f"the ranks declare different rules in on_resize: {list_some(different)}"
        )
    return {name: next(iter(rules)) for name, rules in ranks.items()}


def _warn_of_resizing(rules: dict[str, str], found: Differences, job: LoadJob) -> None:
    """Say what became of values of single ranks that another number of ranks has saved."""
    first = [name for name, rule in rules.items() if rule == "first"]
    kept = [name for name, rule in rules.items() if rule != "first"]
    for names, what in (
        (first, "every rank takes what the first has saved of"),
        (kept, "every rank keeps its own"),
    ):
        if names:
            logger.warning(
                "%s was saved by %s ranks, here are %s: %s %s",
                job.directory.location,
                "/".join(sorted({str(saved) for name, saved, _ in found.resized if name in names})),
                job.coordinator.world_size,
                what,
                list_some(names),
            )


def _union(headers: list[dict[str, Any]], member: str) -> list[Any]:
    """The entries of all ranks, each once, in the order in which they first come."""
    seen: dict[str, Any] = {}
    for header in headers:
        for entry in header[member]:
            seen.setdefault(str(entry), entry)
    return list(seen.values())


def _raise_if_strict(
    found: Differences,
    rules: dict[str, str],
    notes: dict[str, str],
    problems: list[str],
    job: LoadJob,
) -> None:
    is_strict = job.parts.config.is_strict
    missing = [name for name in found.missing if is_strict(name)]
    unexpected = [name for name in found.unexpected if is_strict(name)]
    shapes = [entry for entry in found.shapes if is_strict(entry[0])]
    dtypes = [entry for entry in found.dtypes if is_strict(entry[0])]
    resized = [e for e in found.resized if rules[e[0]] == "error" and is_strict(e[0])]
    kinds: dict[type[LoadMismatchError], list[str]] = {
        RulesMismatchError: [f"rules: {problem}" for problem in problems],
        MissingKeyError: [
            f"missing from the checkpoint: {name}" + (f" ({notes[name]})" if name in notes else "")
            for name in missing
        ],
        UnexpectedKeyError: [
            f"in the checkpoint but not asked for: {name}{_hint(name, job)}" for name in unexpected
        ],
        ShapeMismatchError: [
            f"shape of {name}: {stored} in the checkpoint, {wanted} wanted"
            for name, stored, wanted in shapes
        ],
        DtypeMismatchError: [
            f"dtype of {name}: {stored} in the checkpoint, {wanted} wanted (declare a cast to allow"
            " it)"
            for name, stored, wanted in dtypes
        ],
        WorldSizeMismatchError: [
            f"values of single ranks at {name}: {saved} ranks have saved, {wanted} load (RankLocal"
            " with on_resize='fresh' keeps what is there, 'first' takes the first rank's)"
            for name, saved, wanted in resized
        ],
    }
    present = [kind for kind, lines in kinds.items() if lines]
    if not present:
        return
    lines = [line for kind in present for line in kinds[kind]]
    shown = "\n  ".join(lines[:100]) + (f"\n  and {len(lines) - 100} more" * (len(lines) > 100))
    kind = present[0] if len(present) == 1 else LoadMismatchError
    raise kind(
        f"the state does not fit the checkpoint {job.directory.location} in {len(lines)} places,"
        f" nothing was changed (strict=false, or strict by pattern, allows it):\n  {shown}",
        missing,
        unexpected,
        shapes,
        dtypes,
        resized,
    )


def _hint(name: str, job: LoadJob) -> str:
    if job.view is not None and name in job.view.outcome.untouched:
        return " (no rule takes it)"
    is_local = any(parse_rank_key(part) for part in name.split("."))
    return " (a value of one rank: the state has no RankLocal there)" if is_local else ""
