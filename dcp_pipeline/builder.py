"""A pipeline put together in a program, instead of in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from dcp_pipeline.config.explain import validate
from dcp_pipeline.config.model import PipelineConfig
from dcp_pipeline.core.errors import ConfigError
from dcp_pipeline.core.kind import KindConfig

if TYPE_CHECKING:
    from typing import Self

    from dcp_pipeline.graph.node import Node
    from dcp_pipeline.pipeline import Pipeline

__all__ = ["PipelineBuilder"]


class PipelineBuilder:
    """Collects the parts of a pipeline; what is not named stays at its default.

    >>> builder = PipelineBuilder().stager("host").serialization("safetensors")
    >>> config = builder.storage("filesystem", thread_count=4).config()
    >>> config.serialization.kind, config.storage.thread_count
    ('safetensors', 4)

    A part is named by its kind and the fields of that kind, or given as a kind's config. Nothing
    is checked before `config` or `build`, which report everything that is wrong at once.
    """

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._nodes: dict[str, list[Node]] = {"save": [], "load": []}

    def stager(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Choose how the values are held still while they are written."""
        return self._set("stager", _part("stager", kind, fields))

    def planner(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Choose how the writing is shared among the ranks."""
        return self._set("planner", _part("planner", kind, fields))

    def coordination(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Choose how the ranks agree and commit."""
        return self._set("coordination", _part("coordination", kind, fields))

    def serialization(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Choose how an item becomes bytes."""
        return self._set("serialization", _part("serialization", kind, fields))

    def layout(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Choose how a checkpoint is laid out in a directory."""
        return self._set("layout", _part("layout", kind, fields))

    def storage(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Choose where the bytes go."""
        return self._set("storage", _part("storage", kind, fields))

    def background(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Choose where asynchronous saves run, and what becomes of their errors."""
        return self._set("background", _part("background", kind, fields))

    def manager(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Say when a run saves, which steps stay, and when it stops."""
        return self._set("manager", _part("manager", kind, fields))

    def strict(self, strict: bool | Mapping[str, bool]) -> Self:
        """Say whether a load fails on missing and unexpected keys; whole, or by pattern."""
        return self._set("strict", strict)

    def rollback(self, rollback: Literal["copy", "verify_first", "none"]) -> Self:
        """Choose how a failed load is undone."""
        return self._set("rollback", rollback)

    def overwrite(self, overwrite: Literal["replace", "error"]) -> Self:
        """Choose what a save does to a committed checkpoint."""
        return self._set("overwrite", overwrite)

    def cast(
        self,
        keys: str,
        source: str | None = None,
        target: str | None = None,
        on_overflow: Literal["error", "report"] = "report",
    ) -> Self:
        """Declare a difference of dtypes that a load may bridge; each call adds one.

        Args:
            keys: glob on dotted keys.
            source: the dtype in the checkpoint; ``None`` for any.
            target: the dtype in the caller's tensor; ``None`` for any.
            on_overflow: what to do when values do not fit the target.
        """
        cast = {"keys": keys, "source": source, "target": target, "on_overflow": on_overflow}
        return self._add("casts", cast)

    def transform(self, kind: str | KindConfig, **fields: Any) -> Self:
        """Add a rule that keys and tensors pass through, after those added before."""
        return self._add("transforms", _part("transforms", kind, fields))

    def transforms(self, rules: Iterable[KindConfig | Mapping[str, Any]]) -> Self:
        """Add several rules, such as those of a recipe's map."""
        for rule in rules:
            self._add("transforms", rule)
        return self

    def node(self, node: Node, graph: Literal["save", "load"] = "save") -> Self:
        """Add a node of your own to one of the two graphs.

        Raises:
            ConfigError: there is no such graph.
        """
        if graph not in self._nodes:
            raise ConfigError(f"found the graph {graph!r}; allowed: {', '.join(self._nodes)}")
        self._nodes[graph].append(node)
        return self

    def config(self) -> PipelineConfig:
        """Return the config of what was collected.

        Raises:
            ConfigError: with the path of every key that is wrong, and what is allowed.
        """
        return validate(self._settings)

    def build(self) -> Pipeline:
        """Make the pipeline.

        Raises:
            ConfigError: with the path of every key that is wrong, and what is allowed.
            GraphError: a node of your own does not fit its graph.
        """
        config = self.config()
        from dcp_pipeline.pipeline import Pipeline

        save_nodes, load_nodes = tuple(self._nodes["save"]), tuple(self._nodes["load"])
        return Pipeline(config, save_nodes=save_nodes, load_nodes=load_nodes)

    def _set(self, key: str, value: object) -> Self:
        self._settings[key] = value
        return self

    def _add(self, key: str, value: object) -> Self:
        self._settings.setdefault(key, []).append(value)
        return self


def _part(path: str, kind: str | KindConfig, fields: Mapping[str, Any]) -> object:
    if not isinstance(kind, KindConfig):
        return {"kind": kind, **fields}
    if fields:
        raise ConfigError(
            f"{path}: give fields with the name of a kind, or the config of a kind alone", path
        )
    return kind
