"""Sections of settings: frozen pydantic dataclasses whose errors are one line that names setting, value and remedy."""

import ast
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
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Filled = Annotated[str, Field(min_length=1)]

_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}
_CONFIG = ConfigDict(
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(kind: type[Kind]) -> type[Kind]:
    """Frozen dataclass of one section; its constructor raises ConfigError for a value that it may not hold."""
    made = dataclass(frozen=True, config=_CONFIG)(kind)
    checked = cast(Callable[..., None], made.__init__)

    @functools.wraps(checked)
    def init(self: Any, /, *args: Any, **values: Any) -> None:
        try:
            checked(self, *args, **values)
        except ValidationError as error:
            raise refusal(error, made) from None

    made.__init__ = init  # type: ignore[assignment]
    return cast(type[Kind], made)


def fields_of(kind: type[Any]) -> dict[str, FieldInfo]:
    """The fields of a section by name, those that no file may set left out."""
    found: dict[str, FieldInfo] = kind.__pydantic_fields__
    return {name: field for name, field in found.items() if name != "base"}


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
        name: (get_args(each.annotation) or (each.annotation,))[-1]
        for name, each in fields_of(kind).items()
    }
    return {name: each for name, each in kinds.items() if is_section(each)}


def meanings(kind: type[Any]) -> dict[str, str]:
    """Meaning of each setting on one line: the docstring below it, read from the source only where it is wanted."""
    found = {}
    for each in filter(is_section, reversed(kind.__mro__)):
        (made,) = ast.parse(inspect.getsource(each)).body
        for setting, told in pairwise(getattr(made, "body", ())):
            if isinstance(setting, ast.AnnAssign) and isinstance(told, ast.Expr):
                found[ast.unparse(setting.target)] = " ".join(ast.literal_eval(told.value).split())
    return found


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
    if inner and all(isinstance(each, str) for each in inner):
        return " or ".join(inner)
    if origin in (Union, UnionType):
        return " or ".join(type_in_words(each) for each in inner if each is not type(None))
    return _WORDS.get(annotation, "a section of settings")


def bounds_in_words(field: FieldInfo) -> str:
    """Bounds of a setting, "" without any."""
    found: dict[str, Any] = {
        name: getattr(mark, name)
        for mark in _marks(field)
        for name in ("ge", "gt", "le", "min_length")
        if getattr(mark, name, None) is not None
    }
    if "min_length" in found:
        return "not empty"
    least = f"above {found['gt']:,}" if "gt" in found else ""
    if "ge" in found and "le" in found:
        return f"{found['ge']:,} to {found['le']:,}"
    most = f"at most {found['le']:,}" if "le" in found else ""
    return ", ".join(
        filter(None, [least or (f"at least {found['ge']:,}" if "ge" in found else ""), most])
    )


def _marks(field: FieldInfo) -> Iterator[Any]:
    for each in field.metadata:
        yield each
        yield from getattr(each, "metadata", ())


def refusal(error: ValidationError, kind: type[Any]) -> ConfigError:
    """Line about the first thing that is wrong; its `field` is the setting."""
    first = error.errors(include_url=False)[0]
    place = first["loc"][0]
    name = place if isinstance(place, str) else list(fields_of(kind))[place]
    return ConfigError(_sentence(first, name, kind), field=name)


def _sentence(first: ErrorDetails, name: str, kind: type[Any]) -> str:
    known = fields_of(kind)
    if name not in known:
        return f"unknown setting {name!r}; known are {', '.join(sorted(known))}"
    field, value = known[name], first["input"]
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
