"""YAML of files that are not trusted: plain mappings, lists and scalars, without any sharing."""

from __future__ import annotations

from typing import Any

import yaml

from dcp_pipeline.core.errors import CheckpointError, FormatError, UnsafeCheckpointError

__all__ = ["parse_yaml_object"]

_DEEPEST = 64
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml_object(
    data: bytes, what: str, *, most_bytes: int, most_values: int = 1 << 20
) -> dict[str, Any]:
    """The members of a YAML mapping.

    Args:
        what: the file, for errors.
        most_bytes: that are looked at.
        most_values: scalars, mappings and lists that may be in it.

    Raises:
        FormatError: not a YAML mapping of texts, or one in which a key stands twice.
        UnsafeCheckpointError: too long, too many values or too deep, or an alias, an anchor or a
            tag, which can make little text endless, or code of it.

    Example:
        >>> parse_yaml_object(b"a: [1]", "it", most_bytes=100)
        {'a': [1]}
    """
    if len(data) > most_bytes:
        raise UnsafeCheckpointError(f"{what} has {len(data)} bytes, at most {most_bytes} are read")
    try:
        text = data.decode("utf-8")
        _check_events(text, what, most_values)
        found = yaml.load(text, Loader=_Loader)
    except CheckpointError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as error:
        raise FormatError(f"{what} is not YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} holds a {type(found).__name__}, expected a mapping")
    return found


def _check_events(text: str, what: str, most_values: int) -> None:
    depth = count = 0
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise UnsafeCheckpointError(f"{what} has an alias or an anchor, which no list needs")
        if isinstance(event, yaml.CollectionStartEvent | yaml.ScalarEvent):
            count += 1
            if event.tag is not None:
                raise UnsafeCheckpointError(f"{what} has the tag {event.tag[:80]!r}")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _DEEPEST or count > most_values:
            raise UnsafeCheckpointError(
                f"{what} is nested more than {_DEEPEST} deep, or of more than {most_values} values"
            )


class _Loader(_Base):  # type: ignore[misc]
    """Refuses keys that are no text, or stand twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ValueError("a key that is no text")
            key = key_node.value
            if key in found:
                raise ValueError(f"{key[:200]!r} stands twice")
            found[key] = self.construct_object(value_node, deep=True)
        return found

    def construct_yaml_map(self, node: yaml.MappingNode) -> Any:
        yield self.construct_mapping(node)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)
