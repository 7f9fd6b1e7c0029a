"""Nodes ``collect`` and ``plan`` of the load."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from dcp_pipeline.core.manifest import Manifest
from dcp_pipeline.core.path import Path, dotted
from dcp_pipeline.pipelines.load_job import LoadJob
from dcp_pipeline.pipelines.steps.collect import taken_apart
from dcp_pipeline.pipelines.steps.mapped_view import mapped_view
from dcp_pipeline.rules.base import KeyRule, matches
from dcp_pipeline.state.fitting import Stored
from dcp_pipeline.state.flatten import FlatState
from dcp_pipeline.state.match import Match, match
from dcp_pipeline.state.schedulers import check_schedulers

__all__ = ["collect_template", "is_wanted", "plan"]


def collect_template(state: Any, job: LoadJob) -> FlatState:
    """Take the caller's state apart."""
    job.template = taken_apart(state, job.coordinator)
    job.rollback.keep_objects(job.template)
    return job.template


def is_wanted(key: str, job: LoadJob) -> bool:
    """Whether no rule keeps a dotted key of the state out of the load."""
    # Behind a rule that renames, keys are called as in the checkpoint.
    own = takewhile(lambda rule: not isinstance(rule, KeyRule), job.parts.rules)
    return all(rule.wants(key) for rule in own)


def plan(template: FlatState, manifest: Manifest, job: LoadJob) -> Match:
    """Match the template with the checkpoint."""

    def find_cast(key: str, source: str, target: str) -> bool | None:
        for cast in job.parts.config.casts:
            if (
                matches(key, [cast.keys])
                and cast.source in (None, source)
                and cast.target in (None, target)
            ):
                return cast.on_overflow == "error"
        return None

    def wants(key: str) -> bool:
        return is_wanted(key, job)

    stored = manifest
    if job.parts.rules:
        job.view = mapped_view(manifest, job.parts.rules)
        manifest = job.view.manifest

    def is_stored(path: Path) -> bool:
        # What a rule leaves out is in the checkpoint all the same.
        return any(Stored.below(path, keys).keys for keys in (manifest, stored))

    check_schedulers(template, wants, is_stored)
    for path, state in template.fitting:
        fit = state.fit(Stored.below(path, manifest))
        template.fit(path, fit.of(lambda below: wants(dotted((*path, *below)))))  # noqa: B023
    found = match(template, manifest, find_cast, wants)
    if job.view is not None:
        found.problems += job.view.outcome.problems
        job.view.resolve(found)
    return found
