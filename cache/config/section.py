"""Sections of settings: frozen pydantic dataclasses whose errors name setting, value and remedy in one line."""

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
NonEmptyText = Annotated[str, Field(min_length=1)]

_TYPE_DESCRIPTIONS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a string"}
_LISTED_SETTINGS_MAX = 20
"""Settings of a section up to which an error lists them beside the one that was probably meant."""

_SECTION_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass_transform(frozen_default=True, field_specifiers=(Field,))
def section(plain_class: type[Kind]) -> type[Kind]:
    """Make a class the frozen dataclass of a section; its constructor raises ConfigError for an invalid value."""
    section_class = dataclass(frozen=True, config=_SECTION_CONFIG)(plain_class)
    checked_init = cast(Callable[..., None], section_class.__init__)

    @functools.wraps(checked_init)
    def init(self: Any, /, *args: Any, **values: Any) -> None:
        try:
            checked_init(self, *args, **values)
        except ValidationError as error:
            raise refusal(error, section_class) from None

    section_class.__init__ = init  # type: ignore[assignment]
    return cast(type[Kind], section_class)


def fields_of(section_class: type[Any]) -> dict[str, FieldInfo]:
    """Return the fields of a section by name, without those that no file may set."""
    field_by_name: dict[str, FieldInfo] = section_class.__pydantic_fields__
    return {name: field for name, field in field_by_name.items() if name != "base"}


def environment_variable(setting_name: str) -> str:
    """Return the environment variable of a setting."""
    return "REDIS_URL" if setting_name == "redis_url" else f"LARDER_{setting_name.upper()}"


def variables_by_setting(section_class: type[Any]) -> dict[str, str]:
    """Return the environment variables of a section by setting; nested sections have none."""
    environment_settings = getattr(section_class, "FROM_ENVIRONMENT", ())
    named_settings = (
        fields_of(section_class).keys() - nested_section_classes(section_class).keys()
        if environment_settings is None
        else environment_settings
    )
    return {name: environment_variable(name) for name in fields_of(section_class) if name in named_settings}


def nested_section_classes(outer_class: type[Any]) -> dict[str, type[Any]]:
    """Return the classes of nested sections by name; for a table of sections, the class of its values."""
    class_by_name = {
        name: (get_args(field.annotation) or (field.annotation,))[-1] for name, field in fields_of(outer_class).items()
    }
    return {name: section_class for name, section_class in class_by_name.items() if is_section(section_class)}


def meanings_by_setting(outer_class: type[Any]) -> dict[str, str]:
    """Return the meaning of each setting in one line: the docstring below it, read from the source on demand."""
    meaning_by_setting = {}
    for section_class in filter(is_section, reversed(outer_class.__mro__)):
        (class_node,) = ast.parse(inspect.getsource(section_class)).body
        for setting, docstring_node in pairwise(getattr(class_node, "body", ())):
            if isinstance(setting, ast.AnnAssign) and isinstance(docstring_node, ast.Expr):
                meaning_by_setting[ast.unparse(setting.target)] = " ".join(
                    ast.literal_eval(docstring_node.value).split()
                )
    return meaning_by_setting


def is_section(setting_annotation: Any) -> bool:
    """Return True for a class made by `section`."""
    return isinstance(setting_annotation, type) and is_pydantic_dataclass(setting_annotation)


def type_in_words(setting_annotation: Any) -> str:
    """Describe the values that a setting of this annotated type may have, without bounds."""
    origin, type_arguments = get_origin(setting_annotation), get_args(setting_annotation)
    if origin is Annotated:
        return type_in_words(type_arguments[0])
    if origin is tuple:
        return "a string or a list of strings"
    if type_arguments and all(isinstance(argument, str) for argument in type_arguments):
        return " or ".join(type_arguments)
    if origin in (Union, UnionType):
        return " or ".join(
            type_in_words(member_type) for member_type in type_arguments if member_type is not type(None)
        )
    return _TYPE_DESCRIPTIONS.get(setting_annotation, "a section of settings")


def bounds_in_words(field: FieldInfo) -> str:
    """Describe the bounds of a setting; empty if it has none."""
    bound_by_name: dict[str, Any] = {
        name: getattr(constraint, name)
        for constraint in _iter_field_metadata(field)
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
                lower_bound_text or (f"at least {bound_by_name['ge']:,}" if "ge" in bound_by_name else ""),
                upper_bound_text,
            ],
        )
    )


def _iter_field_metadata(field: FieldInfo) -> Iterator[Any]:
    for constraint in field.metadata:
        yield constraint
        yield from getattr(constraint, "metadata", ())


def refusal(error: ValidationError, section_class: type[Any]) -> ConfigError:
    """Describe the first error in one line; the error's `field` is the setting."""
    first_error = error.errors(include_url=False)[0]
    location = first_error["loc"][0]
    name = location if isinstance(location, str) else list(fields_of(section_class))[location]
    return ConfigError(_error_sentence(first_error, name, section_class), field=name)


def _error_sentence(first_error: ErrorDetails, setting_name: str, section_class: type[Any]) -> str:
    field_by_name = fields_of(section_class)
    if setting_name not in field_by_name:
        close_names = difflib.get_close_matches(setting_name, field_by_name, n=1)
        question = f" did you mean {close_names[0]}?" if close_names else ""
        if close_names and len(field_by_name) > _LISTED_SETTINGS_MAX:
            return f"unknown setting {setting_name!r};{question}"
        return f"unknown setting {setting_name!r};{question} known are {', '.join(sorted(field_by_name))}"
    field, wrong_value = field_by_name[setting_name], first_error["input"]
    match first_error["type"]:
        case "missing":
            return f"{setting_name} is missing; it must be {type_in_words(field.annotation)}"
        case "string_too_short":
            return f"{setting_name} must not be empty"
        case "too_long" | "string_too_long":
            return (
                f"{setting_name} must be one character, not {wrong_value!r}: "
                f"{meanings_by_setting(section_class)[setting_name]}"
            )
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return (
                f"{setting_name} must be {bounds_in_words(field)}, not {wrong_value:,}: "
                f"{meanings_by_setting(section_class)[setting_name]}"
            )
    return f"{setting_name} must be {type_in_words(field.annotation)}, not {wrong_value!r}"
