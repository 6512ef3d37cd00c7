"""Checks of settings: each raises ConfigError naming the setting, its value and what is allowed. Pure."""

import math
import re
from collections.abc import Mapping
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from cache.errors import ConfigError

_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
NAME: Final = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,64}")


def demand_reason(what: str, reason: str | None) -> str:
    """The reason without space around it; raises ConfigError for one that says nothing."""
    if not (reason or "").strip():
        raise ConfigError(
            f"{what} demands a reason (--reason): it is kept in the record", field="reason"
        )
    return str(reason).strip()


def check_types(section: Any) -> None:
    """Raises ConfigError for the first setting whose value is not of its annotated type."""
    for name, hint in get_type_hints(type(section)).items():
        value = getattr(section, name)
        if not _is(hint, value):
            raise ConfigError(f"{name} must be {allowed_values(hint)}, not {value!r}", field=name)


def _is(hint: Any, value: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    if get_origin(hint) is Mapping:
        _, kind = get_args(hint)
        return isinstance(value, Mapping) and all(isinstance(each, kind) for each in value.values())
    if NoneType in get_args(hint):
        return value is None or any(_is(each, value) for each in get_args(hint))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    return isinstance(value, hint)


def allowed_values(hint: Any) -> str:
    """Values that a setting of this annotated type may have, in words."""
    if get_origin(hint) is Literal:
        return " or ".join(get_args(hint))
    if NoneType in get_args(hint):
        return " or ".join(allowed_values(each) for each in get_args(hint) if each is not NoneType)
    if get_origin(hint) is tuple:
        return "a string or a list of strings"
    words = {
        bool: "true or false",
        str: "a string",
        int: "a whole number",
        float: "a finite number",
    }
    return words.get(hint, "a section of settings")


def truth(name: str, text: str) -> bool:
    """An environment variable that is a yes or a no."""
    if text.lower() not in _TRUE | _FALSE:
        raise ConfigError(f"{name} is true or false, not {text!r}", field=name)
    return text.lower() in _TRUE


def check_name(what: str, value: str) -> None:
    """Raises ConfigError unless `value` is fit for Redis keys and folder names alike."""
    if not NAME.fullmatch(value):
        raise ConfigError(
            f"{what} has 1 to 64 letters, digits, dots, hyphens or underscores and does not start with a dot: "
            f"{value!r}",
            field=what,
        )


def check_filled(section: Any, *names: str) -> None:
    """Raises ConfigError for the first of these settings that is empty."""
    for name in names:
        if not getattr(section, name):
            raise ConfigError(f"{name} must not be empty", field=name)


def check_range(section: Any, name: str, lowest: int, highest: int | None = None) -> None:
    """Raises ConfigError unless `lowest` <= the setting <= `highest`."""
    value = getattr(section, name)
    if value < lowest or (highest is not None and value > highest):
        allowed = f"at least {lowest:,}" if highest is None else f"{lowest:,} to {highest:,}"
        raise ConfigError(f"{name} must be {allowed}, not {value:,}", field=name)


def check_above_zero(section: Any, *names: str) -> None:
    """Raises ConfigError for the first of these settings that is 0 or less."""
    for name in names:
        if not (value := getattr(section, name)) > 0:
            raise ConfigError(f"{name} must be above 0, not {value}", field=name)
