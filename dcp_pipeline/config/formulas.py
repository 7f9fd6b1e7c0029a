"""Arithmetic on the dimensions of a model: ``(heads + 2 * kv_heads) * head_dim``.

A formula is an integer, or a text of names, integers, ``+ - * //`` and parentheses. Nothing else is
evaluated: no attribute, no call, no power.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Final

from pydantic import PlainValidator

from dcp_pipeline.core.registry import did_you_mean

__all__ = ["Formula", "evaluate", "evaluate_all", "names_in"]

_MOST_CHARACTERS = 200

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def _readable(formula: object) -> int | str:
    if isinstance(formula, bool) or not isinstance(formula, int | str):
        raise ValueError("expected an integer, or a formula as text")
    _parsed(formula)
    return formula


Formula = Annotated[int | str, PlainValidator(_readable)]
"""An integer, or a formula that can be read."""


def evaluate(formula: int | str, names: Mapping[str, int]) -> int:
    """The value of a formula.

    >>> evaluate("(heads + 2 * kv_heads) * head_dim", {"heads": 32, "kv_heads": 8, "head_dim": 128})
    6144

    Raises:
        ValueError: the formula has something else in it, or a name that is not known.
    """
    if isinstance(formula, int):
        return formula
    try:
        return _value(_parsed(formula), names)
    except ZeroDivisionError:
        raise ValueError(f"{formula!r} divides by 0") from None


def evaluate_all(formulas: Mapping[str, int | str]) -> dict[str, int]:
    """The values of named formulas, each of which may use those before it.

    >>> evaluate_all({"hidden": 768, "ffn": "4 * hidden"})
    {'hidden': 768, 'ffn': 3072}

    Raises:
        ValueError: naming the formula, as `evaluate` does.
    """
    values: dict[str, int] = {}
    for name, formula in formulas.items():
        try:
            values[name] = evaluate(formula, values)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return values


def names_in(formula: int | str) -> set[str]:
    """The names that a formula uses.

    >>> sorted(names_in("(heads + 2 * kv_heads) * 4"))
    ['heads', 'kv_heads']
    """
    return {node.id for node in ast.walk(_parsed(formula)) if isinstance(node, ast.Name)}


def _parsed(formula: int | str) -> ast.expr:
    text = str(formula)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"a formula of {len(text)} characters; at most {_MOST_CHARACTERS}")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is no formula") from None
    _check(node, text)
    return node


def _check(node: ast.expr, text: str) -> None:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        _check(node.left, text)
        _check(node.right, text)
    elif not isinstance(node, ast.Name) and not (
        isinstance(node, ast.Constant) and type(node.value) is int
    ):
        raise ValueError(
            f"{text!r}: found {ast.unparse(node)!r}; a formula has names, integers, + - * // and"
            " parentheses"
        )


def _value(node: ast.expr, names: Mapping[str, int]) -> int:
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, names), _value(node.right, names))
    if isinstance(node, ast.Name):
        if node.id not in names:
            known = tuple(names)
            raise ValueError(
                f"found the name {node.id!r}; known: {', '.join(known) or 'none'}"
                f"{did_you_mean(node.id, known)}"
            )
        return names[node.id]
    assert isinstance(node, ast.Constant) and type(node.value) is int
    return node.value
