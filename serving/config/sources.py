"""Sources of settings: the section of a TOML file, and texts converted to a setting's type."""

import tomllib
from dataclasses import Field
from pathlib import Path
from typing import Any, Literal, get_origin

from cache.errors import ConfigError

_SHARED = (
    "namespace", "artifacts", "state", "ephemeral_state", "redis_url", "schedule", "timezone", "schedule_grace_s",
)  # fmt: skip
_PLACES = ("state", "artifacts")
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off", ""}


def from_toml(path: Path, known: tuple[Field[Any], ...]) -> dict[str, object]:
    """The values of the [serving] section, and of those above it that the night reads too.

    Raises ConfigError for an unreadable file or an unknown setting.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    section = document.get("serving", {})
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: [serving] is a table of settings")
    if unknown := sorted(set(section) - {each.name for each in known}):
        raise ConfigError(f"{path}: [serving] has no setting {', '.join(unknown)}", fields=unknown)
    # Paths are relative to the file, their defaults too: the night that it configures writes there.
    values: dict[str, object] = {each.name: each.default for each in known if each.name in _PLACES}
    values |= {name: document[name] for name in _SHARED if name in document}
    values |= section
    for name in _PLACES:
        if "://" not in str(values[name]):
            values[name] = str(path.parent / str(values[name]))
    return values


def typed(name: str, kind: object, value: object) -> object:
    """The value as a setting of this type takes it; raises ConfigError for another one."""
    try:
        if kind is bool and isinstance(value, str):
            lowered = value.lower()
            if lowered not in _TRUE | _FALSE:
                raise ValueError("neither true nor false")
            return lowered in _TRUE
        if kind is Path:
            return Path(str(value))
        if (
            kind in (int, float)
            and isinstance(value, str | int | float)
            and not isinstance(value, bool)
        ):
            number = float(value)
            if kind is float:
                return number
            if number != int(number):
                raise ValueError("not a whole number")
            return int(number)
        if kind is bool and isinstance(value, bool):
            return value
        if (kind is str or get_origin(kind) is Literal) and isinstance(value, str):
            return value
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{name} = {value!r}: {error}", field=name) from error
    raise ConfigError(f"{name} = {value!r} has the wrong type", field=name)
