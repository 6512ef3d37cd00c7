"""Parser of filter expressions: JSON within bounds; an error names the path of the wrong part. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import orjson

from cache.errors import InvalidInput

Comparison = Literal["==", "in", "<", "<=", ">", ">=", "contains", "exists"]
Scalar = str | int | float | bool

DEPTH_MAX: Final = 8
"""Levels of nested combinations."""
NODES_MAX: Final = 32
"""Comparisons and combinations of one filter: each is a pass over all items."""
VALUES_MAX: Final = 1_000
"""Values of all comparisons of a filter together."""
TEXT_BYTES_MAX: Final = 256
"""Bytes of the UTF-8 of a value or a name."""

_COMPARISONS: Final = get_args(Comparison)
_COMBINATIONS: Final = ("and", "or", "not")
_NUMBER_MAX: Final = 2**53


class InvalidFilter(InvalidInput):
    """A filter is malformed, too large, or does not fit the attributes; `details["field"]` is the wrong part's path."""

    code = "invalid_filter"


@dataclass(frozen=True, slots=True)
class ComparisonNode:
    """Comparison of an attribute with `values` (one, several for `in`, none for `exists`); errors name `field_path`."""

    operator: Comparison
    attribute: str
    values: tuple[Scalar, ...]
    field_path: str


@dataclass(frozen=True, slots=True)
class CombinationNode:
    """Combination of expressions: `and`, `or`, or `not` of one."""

    operator: Literal["and", "or", "not"]
    parts: tuple["Expression", ...]


Expression = ComparisonNode | CombinationNode


@dataclass(frozen=True, slots=True)
class Filter:
    """Expression of a filter, and bytes that are equal for equal filters."""

    root: Expression
    key: bytes

    @property
    def attributes(self) -> frozenset[str]:
        """Names of the attributes that the filter compares."""
        return frozenset(_names_in(self.root))


def _names_in(expression: Expression) -> Iterator[str]:
    if isinstance(expression, ComparisonNode):
        yield expression.attribute
        return
    for part in expression.parts:
        yield from _names_in(part)


def read_filter(value: object) -> Filter:
    """Parse a JSON value, such as `{"and": [{"<": ["price", 20]}, {"not": {"in": ["brand", ["x", "y"]]}}]}`.

    Raises InvalidFilter with the path of the wrong part, such as `and[1].not`; empty for the whole filter.
    """
    reader = _FilterReader()
    root = reader.read(value, "", 0)
    return Filter(root, orjson.dumps(value, option=orjson.OPT_SORT_KEYS))


class _FilterReader:
    """Parser of one filter, with the counts that its bounds need."""

    def __init__(self) -> None:
        self.nodes = self.values = 0

    def read(self, value: object, path: str, depth: int) -> Expression:
        self.nodes += 1
        if self.nodes > NODES_MAX:
            raise _refused(f"a filter has at most {NODES_MAX} expressions", path, limit=NODES_MAX)
        if depth > DEPTH_MAX:
            raise _refused(
                f"expressions stand at most {DEPTH_MAX} deep in one another", path, limit=DEPTH_MAX
            )
        if not isinstance(value, dict) or len(value) != 1:
            raise _refused(
                'an expression is a JSON object with one operator, such as {"<": ["price", 20]}',
                path,
            )
        ((operator, operand),) = value.items()
        below = f"{path}.{operator}" if path else operator
        if operator in _COMBINATIONS:
            return CombinationNode(operator, self._parts(operator, operand, below, depth))
        if operator in _COMPARISONS:
            return self._comparing(operator, operand, below)
        operator_names = ", ".join((*_COMBINATIONS, *_COMPARISONS))
        raise _refused(f"there is no operator {operator[:40]!r}; there are {operator_names}", path)

    def _parts(
        self, operator: str, operand: object, path: str, depth: int
    ) -> tuple[Expression, ...]:
        if operator == "not":
            return (self.read(operand, path, depth + 1),)
        if not isinstance(operand, list) or not operand:
            raise _refused(f"{operator} takes a list of one or more expressions", path)
        return tuple(
            self.read(part, f"{path}[{number}]", depth + 1) for number, part in enumerate(operand)
        )

    def _comparing(self, operator: Comparison, operand: object, path: str) -> ComparisonNode:
        if operator == "exists":
            return ComparisonNode(operator, _name(operand, path), (), path)
        if not isinstance(operand, list) or len(operand) != 2:
            raise _refused(
                f'{operator} takes a list of an attribute and a value, such as ["price", 20]', path
            )
        name, comparand = _name(operand[0], f"{path}[0]"), operand[1]
        if operator != "in":
            self._count(1, path)
            return ComparisonNode(operator, name, (_scalar(comparand, f"{path}[1]"),), path)
        if not isinstance(comparand, list) or not comparand:
            raise _refused("in takes an attribute and a list of one or more values", f"{path}[1]")
        self._count(len(comparand), f"{path}[1]")
        values = (
            _scalar(raw_value, f"{path}[1][{number}]") for number, raw_value in enumerate(comparand)
        )
        return ComparisonNode(operator, name, tuple(values), path)

    def _count(self, values: int, path: str) -> None:
        self.values += values
        if self.values > VALUES_MAX:
            raise _refused(
                f"a filter compares with at most {VALUES_MAX} values", path, limit=VALUES_MAX
            )


def _name(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _refused("the name of an attribute is a text", path)
    return _text(value, path)


def _scalar(value: Any, path: str) -> Scalar:
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) <= _NUMBER_MAX:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _refused("a value is a text, a finite number up to 2**53, true or false", path)


def _text(value: str, path: str) -> str:
    if len(value.encode(errors="replace")) > TEXT_BYTES_MAX:
        raise _refused(f"a text has at most {TEXT_BYTES_MAX} bytes", path, limit=TEXT_BYTES_MAX)
    return value


def _refused(message: str, path: str, **details: object) -> InvalidFilter:
    return InvalidFilter(message, **({"field": path} if path else {}), **details)
