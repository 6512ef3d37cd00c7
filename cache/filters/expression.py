"""Parser of filter expressions: JSON within bounds; an error names the path of the part that is wrong. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import orjson

from cache.errors import InvalidInput

Comparison = Literal["==", "in", "<", "<=", ">", ">=", "contains", "exists"]
Scalar = str | int | float | bool

DEPTH_MAX: Final = 8
"""Largest depth of nested combinations."""
NODES_MAX: Final = 32
"""Largest number of comparisons and combinations in one filter: each one reads a value of every item."""
VALUES_MAX: Final = 1_000
"""Largest total number of values in the comparisons of a filter."""
TEXT_BYTES_MAX: Final = 256
"""Largest size of a value or a name in bytes of UTF-8."""

_COMPARISONS: Final = get_args(Comparison)
_COMBINATIONS: Final = ("and", "or", "not")
_WHOLE_NUMBER_MAX: Final = 2**53


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
    """Parsed filter, and its canonical bytes, which are equal for equal filters."""

    root_expression: Expression
    canonical_bytes: bytes

    @property
    def attribute_names(self) -> frozenset[str]:
        """Names of the attributes that the filter compares."""
        return frozenset(_attribute_names_in(self.root_expression))


def _attribute_names_in(expression: Expression) -> Iterator[str]:
    if isinstance(expression, ComparisonNode):
        yield expression.attribute
        return
    for part in expression.parts:
        yield from _attribute_names_in(part)


def read_filter(json_value: object) -> Filter:
    """Parse a JSON value, such as `{"and": [{"<": ["price", 20]}, {"not": {"in": ["brand", ["x", "y"]]}}]}`.

    Raises InvalidFilter with the path of the wrong part, such as `and[1].not`; empty for the whole filter.
    """
    reader = _FilterReader()
    root_expression = reader.parse_expression(json_value, "", 0)
    return Filter(root_expression, orjson.dumps(json_value, option=orjson.OPT_SORT_KEYS))


class _FilterReader:
    """Parser of one filter, with the counts that its bounds need."""

    def __init__(self) -> None:
        self.node_count = self.value_count = 0

    def parse_expression(self, json_value: object, field_path: str, nesting_depth: int) -> Expression:
        self.node_count += 1
        if self.node_count > NODES_MAX:
            raise _filter_error(f"a filter has at most {NODES_MAX} expressions", field_path, limit=NODES_MAX)
        if nesting_depth > DEPTH_MAX:
            raise _filter_error(f"expressions may be nested at most {DEPTH_MAX} deep", field_path, limit=DEPTH_MAX)
        if not isinstance(json_value, dict) or len(json_value) != 1:
            raise _filter_error(
                'an expression is a JSON object with one operator, such as {"<": ["price", 20]}', field_path
            )
        ((operator, operand),) = json_value.items()
        operand_path = f"{field_path}.{operator}" if field_path else operator
        if operator in _COMBINATIONS:
            return CombinationNode(operator, self._parse_operands(operator, operand, operand_path, nesting_depth))
        if operator in _COMPARISONS:
            return self._parse_comparison(operator, operand, operand_path)
        operator_names = ", ".join((*_COMBINATIONS, *_COMPARISONS))
        raise _filter_error(f"there is no operator {operator[:40]!r}; there are {operator_names}", field_path)

    def _parse_operands(
        self, operator: str, operand: object, field_path: str, nesting_depth: int
    ) -> tuple[Expression, ...]:
        if operator == "not":
            return (self.parse_expression(operand, field_path, nesting_depth + 1),)
        if not isinstance(operand, list) or not operand:
            raise _filter_error(f"{operator} takes a list of one or more expressions", field_path)
        return tuple(
            self.parse_expression(part, f"{field_path}[{index}]", nesting_depth + 1)
            for index, part in enumerate(operand)
        )

    def _parse_comparison(self, operator: Comparison, operand: object, field_path: str) -> ComparisonNode:
        if operator == "exists":
            return ComparisonNode(operator, _checked_attribute_name(operand, field_path), (), field_path)
        if not isinstance(operand, list) or len(operand) != 2:
            raise _filter_error(
                f'{operator} takes a list of an attribute and a value, such as ["price", 20]', field_path
            )
        attribute, comparand = _checked_attribute_name(operand[0], f"{field_path}[0]"), operand[1]
        if operator != "in":
            self._count_values(1, field_path)
            return ComparisonNode(operator, attribute, (_checked_scalar(comparand, f"{field_path}[1]"),), field_path)
        if not isinstance(comparand, list) or not comparand:
            raise _filter_error("in takes a list of an attribute and a list of one or more values", f"{field_path}[1]")
        self._count_values(len(comparand), f"{field_path}[1]")
        values = (_checked_scalar(raw_value, f"{field_path}[1][{index}]") for index, raw_value in enumerate(comparand))
        return ComparisonNode(operator, attribute, tuple(values), field_path)

    def _count_values(self, added_value_count: int, field_path: str) -> None:
        self.value_count += added_value_count
        if self.value_count > VALUES_MAX:
            raise _filter_error(f"a filter may compare with at most {VALUES_MAX} values", field_path, limit=VALUES_MAX)


def _checked_attribute_name(raw_attribute_name: object, field_path: str) -> str:
    if not isinstance(raw_attribute_name, str):
        raise _filter_error("the name of an attribute is a text", field_path)
    return _checked_text(raw_attribute_name, field_path)


def _checked_scalar(raw_value: Any, field_path: str) -> Scalar:
    if isinstance(raw_value, str):
        return _checked_text(raw_value, field_path)
    if isinstance(raw_value, bool):
        return raw_value
    if isinstance(raw_value, int) and abs(raw_value) <= _WHOLE_NUMBER_MAX:
        return raw_value
    if isinstance(raw_value, float) and math.isfinite(raw_value):
        return raw_value
    raise _filter_error("a value is a text, a finite number up to 2**53, true or false", field_path)


def _checked_text(text: str, field_path: str) -> str:
    if len(text.encode(errors="replace")) > TEXT_BYTES_MAX:
        raise _filter_error(f"a text has at most {TEXT_BYTES_MAX} bytes", field_path, limit=TEXT_BYTES_MAX)
    return text


def _filter_error(message: str, field_path: str, **details: object) -> InvalidFilter:
    return InvalidFilter(message, **({"field": field_path} if field_path else {}), **details)
