"""Sections of settings: frozen pydantic dataclasses whose errors are one line that names setting, value and remedy."""

import ast
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass, is_pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from cache.errors import ConfigError

Kind = TypeVar("Kind")
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Filled = Annotated[str, Field(min_length=1)]

_TYPE_DESCRIPTIONS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
}
_CONFIG = ConfigDict(
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(kind: type[Kind]) -> type[Kind]:
    """Frozen dataclass of one section; its constructor raises ConfigError for a value that it may not hold."""
    section_class = dataclass(frozen=True, config=_CONFIG)(kind)
    checked = cast(Callable[..., None], section_class.__init__)

    @functools.wraps(checked)
    def init(self: Any, /, *args: Any, **values: Any) -> None:
        try:
            checked(self, *args, **values)
        except ValidationError as error:
            raise refusal(error, section_class) from None

    section_class.__init__ = init  # type: ignore[assignment]
    return cast(type[Kind], section_class)


def fields_of(kind: type[Any]) -> dict[str, FieldInfo]:
    """The fields of a section by name, those that no file may set left out."""
    field_by_name: dict[str, FieldInfo] = kind.__pydantic_fields__
    return {name: field for name, field in field_by_name.items() if name != "base"}


def variable(name: str) -> str:
    """The environment variable of a setting that may come from there."""
    return "REDIS_URL" if name == "redis_url" else f"LARDER_{name.upper()}"


def variables(kind: type[Any]) -> dict[str, str]:
    """Environment variables of a section, by setting; sections within it have none."""
    read = getattr(kind, "FROM_ENVIRONMENT", ())
    named = fields_of(kind).keys() - sections_of(kind).keys() if read is None else read
    return {name: variable(name) for name in fields_of(kind) if name in named}


def sections_of(kind: type[Any]) -> dict[str, type[Any]]:
    """Sections within a section, by name: their class, or for a table of sections the class of each."""
    kinds = {
        name: (get_args(field.annotation) or (field.annotation,))[-1]
        for name, field in fields_of(kind).items()
    }
    return {
        name: section_class for name, section_class in kinds.items() if is_section(section_class)
    }


def meanings(kind: type[Any]) -> dict[str, str]:
    """Return the meaning of each setting in one line: the docstring below it, read from the source on demand."""
    meaning_by_setting = {}
    for section_class in filter(is_section, reversed(kind.__mro__)):
        (class_node,) = ast.parse(inspect.getsource(section_class)).body
        for setting, docstring_node in pairwise(getattr(class_node, "body", ())):
            if isinstance(setting, ast.AnnAssign) and isinstance(docstring_node, ast.Expr):
                meaning_by_setting[ast.unparse(setting.target)] = " ".join(
                    ast.literal_eval(docstring_node.value).split()
                )
    return meaning_by_setting


def is_section(annotation: Any) -> bool:
    """True for a class that `section` made."""
    return isinstance(annotation, type) and is_pydantic_dataclass(annotation)


def type_in_words(annotation: Any) -> str:
    """Values that a setting of this annotated type may have, bounds left out."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_in_words(inner[0])
    if origin is tuple:
        return "a string or a list of strings"
    if inner and all(isinstance(argument, str) for argument in inner):
        return " or ".join(inner)
    if origin in (Union, UnionType):
        return " or ".join(
            type_in_words(member_type) for member_type in inner if member_type is not type(None)
        )
    return _TYPE_DESCRIPTIONS.get(annotation, "a section of settings")


def bounds_in_words(field: FieldInfo) -> str:
    """Bounds of a setting, "" without any."""
    bound_by_name: dict[str, Any] = {
        name: getattr(constraint, name)
        for constraint in _iter_metadata(field)
        for name in ("ge", "gt", "le", "min_length")
        if getattr(constraint, name, None) is not None
    }
    if "min_length" in bound_by_name:
        return "not empty"
    lower_bound_text = f"above {bound_by_name['gt']:,}" if "gt" in bound_by_name else ""
    if "ge" in bound_by_name and "le" in bound_by_name:
        return f"{bound_by_name['ge']:,} to {bound_by_name['le']:,}"
    upper_bound_text = f"at most {bound_by_name['le']:,}" if "le" in bound_by_name else ""
    return ", ".join(
        filter(
            None,
            [
                lower_bound_text
                or (f"at least {bound_by_name['ge']:,}" if "ge" in bound_by_name else ""),
                upper_bound_text,
            ],
        )
    )


def _iter_metadata(field: FieldInfo) -> Iterator[Any]:
    for constraint in field.metadata:
        yield constraint
        yield from getattr(constraint, "metadata", ())


def refusal(error: ValidationError, kind: type[Any]) -> ConfigError:
    """Line about the first thing that is wrong; its `field` is the setting."""
    first = error.errors(include_url=False)[0]
    location = first["loc"][0]
    name = location if isinstance(location, str) else list(fields_of(kind))[location]
    return ConfigError(_sentence(first, name, kind), field=name)


def _sentence(first: ErrorDetails, name: str, kind: type[Any]) -> str:
    field_by_name = fields_of(kind)
    if name not in field_by_name:
        near = difflib.get_close_matches(name, field_by_name, n=1)
        question = f" did you mean {near[0]}?" if near else ""
        return f"unknown setting {name!r};{question} known are {', '.join(sorted(field_by_name))}"
    field, value = field_by_name[name], first["input"]
    match first["type"]:
        case "missing":
            return f"{name} is missing; it must be {type_in_words(field.annotation)}"
        case "string_too_short":
            return f"{name} must not be empty"
        case "too_long" | "string_too_long":
            return f"{name} must be one character, not {value!r}: {meanings(kind)[name]}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"{name} must be {bounds_in_words(field)}, not {value:,}: {meanings(kind)[name]}"
    return f"{name} must be {type_in_words(field.annotation)}, not {value!r}"
