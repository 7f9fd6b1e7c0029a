"""The config of a pipeline: everything that a save or a load can be told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from dcp_pipeline.background.config import ThreadBackgroundConfig
from dcp_pipeline.config.kinds import kind_config
from dcp_pipeline.coordination.config import ProcessGroupConfig
from dcp_pipeline.core.kind import FrozenModel, KindConfig
from dcp_pipeline.core.registry import GROUPS, TRANSFORM
from dcp_pipeline.layout.config import DcpLayoutConfig
from dcp_pipeline.planning.config import DefaultPlannerConfig
from dcp_pipeline.rules.config import DeclaredCast
from dcp_pipeline.serialization.config import TorchSaveConfig
from dcp_pipeline.staging.config import InplaceStagerConfig
from dcp_pipeline.storage.config import FileSystemConfig

if TYPE_CHECKING:
    from typing import Self

__all__ = ["PipelineConfig"]

_PATTERNS: TypeAdapter[dict[str, bool]] = TypeAdapter(dict[str, bool], config={"strict": True})


def _strictness(value: object) -> object:
    if isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return _PATTERNS.validate_python(dict(value))
    raise ValueError("expected true, false, or a mapping of patterns on keys to true or false")


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _group(name: str, default: str | None) -> BeforeValidator:
    return BeforeValidator(partial(kind_config, name, default))


_Rule = Annotated[SerializeAsAny[KindConfig], _group(TRANSFORM, None)]


class PipelineConfig(FrozenModel):
    """A checked and frozen config. Its defaults are those of ``conf/checkpoint/pipeline.yaml``.

    A group is given as the config of a kind, as a mapping with ``kind`` and its fields, or as the
    name of a kind alone.

    >>> config = PipelineConfig(stager="inplace", storage={"thread_count": 4})
    >>> config.stager.kind, config.storage.kind, config.to_dict()["storage"]["thread_count"]
    ('inplace', 'filesystem', 4)

    Attributes:
        stager: how the values are held still while they are written.
        planner: which rank writes which part.
        coordination: how the ranks agree and commit.
        serialization: how an item becomes bytes.
        layout: how a checkpoint is laid out in a directory.
        storage: where the bytes go.
        background: where asynchronous saves run, and what becomes of their errors.
        manager: when a run saves, which steps stay, and when it stops.
        rollback: how a failed load is undone: ``copy`` keeps the old values meanwhile,
            ``verify_first`` reads everything twice, ``none`` leaves what was loaded.
        strict: whether a load fails on missing and unexpected keys; whole, or by pattern on
            dotted keys, see `is_strict`.
        casts: differences of dtypes that a load may bridge.
        transforms: rules that a save or a load passes its keys and tensors through, in order.
        read_replicas: what several ranks need of a checkpoint is read by ``each`` of them, or
            ``once`` and passed on; ``auto`` passes on where that saves much: many replicas, or
            blocks of which each rank needs only a part.
        overwrite: whether a save ``replace``s a committed checkpoint or raises an ``error``.
        fingerprint: whether a save takes the fingerprint of the values while it writes them, and
            keeps it in the manifest.
    """

    stager: Annotated[SerializeAsAny[KindConfig], _group("stager", "inplace")] = (
        InplaceStagerConfig()
    )
    planner: Annotated[SerializeAsAny[KindConfig], _group("planner", "default")] = (
        DefaultPlannerConfig()
    )
    coordination: Annotated[SerializeAsAny[KindConfig], _group("coordination", "process_group")] = (
        ProcessGroupConfig()
    )
    serialization: Annotated[SerializeAsAny[KindConfig], _group("serialization", "torch_save")] = (
        TorchSaveConfig()
    )
    layout: Annotated[SerializeAsAny[KindConfig], _group("layout", "dcp")] = DcpLayoutConfig()
    storage: Annotated[SerializeAsAny[KindConfig], _group("storage", "filesystem")] = (
        FileSystemConfig()
    )
    background: Annotated[SerializeAsAny[KindConfig], _group("background", "thread")] = (
        ThreadBackgroundConfig()
    )
    # By name, since the manager stands above the config.
    manager: Annotated[SerializeAsAny[KindConfig], _group("manager", "default")] = Field(
        default_factory=partial(kind_config, "manager", "default", "default")
    )
    rollback: Literal["copy", "verify_first", "none"] = "copy"
    strict: Annotated[bool | dict[str, bool], BeforeValidator(_strictness)] = True
    casts: Annotated[tuple[DeclaredCast, ...], BeforeValidator(_as_tuple)] = ()
    transforms: Annotated[tuple[_Rule, ...], BeforeValidator(_as_tuple)] = ()
    overwrite: Literal["replace", "error"] = "replace"
    read_replicas: Literal["each", "once", "auto"] = "auto"
    fingerprint: bool = True

    @model_validator(mode="before")
    @classmethod
    def _fill_in_what_is_demanded(cls, data: Any) -> Any:
        """A group that is left out takes the kind that a chosen one needs, if not its default."""
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        for group in GROUPS:
            if group not in data:
                continue
            default: KindConfig = cls.model_fields[group].get_default(call_default_factory=True)
            try:
                chosen = kind_config(group, default.kind, data[group])
            except ValueError:
                continue  # the group's own field says so, with its place
            for other, allowed in chosen.works_with.items():
                of_other = cls.model_fields[other].get_default(call_default_factory=True).kind
                if other not in filled and of_other not in allowed:
                    filled[other] = allowed[0]
        return filled

    @model_validator(mode="after")
    def _kinds_go_together(self) -> Self:
        problems = list(self._refused_combinations())
        if problems:
            raise ValidationError.from_exception_data("PipelineConfig", problems)
        return self

    def _refused_combinations(self) -> Iterator[InitErrorDetails]:
        for group in GROUPS:
            chosen: KindConfig = getattr(self, group)
            for other, allowed in chosen.works_with.items():
                found: KindConfig = getattr(self, other)
                if found.kind in allowed:
                    continue
                message = "{group}={kind} cannot be combined with it; it works with: {allowed}"
                context = {"group": group, "kind": chosen.kind, "allowed": ", ".join(allowed)}
                yield InitErrorDetails(
                    type=PydanticCustomError("refused_combination", message, context),
                    loc=(other,),
                    input=found.kind,
                )

    def is_strict(self, key: str) -> bool:
        """Whether a load fails when ``key`` (dotted) is missing or unexpected.

        A pattern is a glob, and one without wildcards covers everything below it too. The longest
        pattern that matches decides; a key that none matches is strict.

        >>> config = PipelineConfig(strict={"model": False, "model.head.*": True})
        >>> [config.is_strict(key) for key in ("model.body", "model.head.weight", "optimizer.lr")]
        [False, True, True]
        """
        if isinstance(self.strict, bool):
            return self.strict
        matching = [pattern for pattern in self.strict if _covers(pattern, key)]
        return self.strict[max(matching, key=len)] if matching else True

    def to_dict(self) -> dict[str, Any]:
        """Return the whole config as plain JSON data, from which it can be validated again."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Return a SHA-256, in hex, that is equal for equal configs on every rank and machine."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _covers(pattern: str, key: str) -> bool:
    return fnmatchcase(key, pattern) or key.startswith(f"{pattern}.")
