"""Reads settings from the file, the environment and the command line; a later source overrides an earlier one."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Self, TypeVar, get_args, get_origin

from pydantic import ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, SettingsConfigDict

from cache.config.section import environment_variable, fields_of, is_section, refusal, variables_by_setting
from cache.errors import ConfigError, mask_secrets

Kind = TypeVar("Kind")
PATH_SETTINGS = frozenset({"artifacts", "state", "tokens_file", "tls_certificate", "tls_key", "tls_client_ca"})
"""Settings that are paths; a relative path in a file starts at the file's folder, one in the environment at the current
folder."""
SECRET_SETTINGS = frozenset({"token", "redis_url", "events_url", "artifacts"})
"""Settings that hold a secret; a URL counts if it contains a password."""


@dataclass(frozen=True)
class ConfigFile:
    """Configuration file; `document` is its parsed TOML, not validated except that secrets are refused."""

    path: Path | None = None
    document: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def named(cls, environ: Mapping[str, str], path: str | Path | None = None) -> Self:
        """Return the given file, else the one that LARDER_CONFIG names, else an empty one.

        Raises ConfigError if it cannot be read.
        """
        if not (config_path := path or environ.get("LARDER_CONFIG")):
            return cls()
        try:
            document = tomllib.loads(_decode_text(Path(config_path).read_bytes()))
        except FileNotFoundError as error:
            raise ConfigError(f"cannot read configuration file {config_path}: it does not exist") from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"cannot read configuration file {config_path}: it is not UTF-8: save it as UTF-8"
            ) from error
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read configuration file {config_path}: {error}") from error
        return cls(Path(config_path), document)

    def section_values(self, section_name: str) -> Mapping[str, Any]:
        """Return the values of a section; empty if the file has no such section."""
        section_values = self.document.get(section_name, {})
        if not isinstance(section_values, Mapping):
            raise ConfigError(
                f"{self.path} [{section_name}] must be a section of settings, not {section_values!r}",
                field=section_name,
            )
        return section_values

    def top_level_values(self, section_class: type[Any]) -> dict[str, Any]:
        """Return the top-level values that are settings of this class."""
        return {name: self.document[name] for name in fields_of(section_class) if name in self.document}

    def resolve_path(self, path: str) -> str:
        """Return a relative path as absolute, from the file's folder.

        A URL, or a path that is not from a file, is returned unchanged.
        """
        return path if self.path is None or "://" in path else str(self.path.parent.absolute() / path)


def _decode_text(file_bytes: bytes) -> str:
    """Decode a file's text and drop byte order marks, which editors write in UTF-8 and PowerShell in UTF-16."""
    encoding = "utf-16" if file_bytes.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    # TOML accepts CR LF and LF as line breaks, but not CR.
    return file_bytes.decode(encoding).lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(strict=True, extra="forbid", case_sensitive=True, allow_inf_nan=False)


class _Environment(EnvSettingsSource):
    """Settings source for a section's environment variables; an empty variable is unset, as in compose files."""

    def __init__(self, settings_class: type[BaseSettings], value_by_variable: Mapping[str, str]) -> None:
        super().__init__(settings_class)
        self.env_vars = value_by_variable


def read_section(
    section_class: type[Kind],
    file_values: Mapping[str, Any],
    file: ConfigFile,
    environ: Mapping[str, str],
    *,
    section_name: str = "",
    **overrides: Any,
) -> Kind:
    """Build a section from its values in the file, then its environment variables, then overrides that are not None.

    `section_name` is the section's name in the file. Raises ConfigError that names the file and table, or the variable,
    of the wrong value.
    """
    field_by_name: Mapping[str, FieldInfo] = section_class.__pydantic_fields__  # type: ignore[attr-defined]
    variable_by_setting = variables_by_setting(section_class)
    environment_values = {
        name: environ[variable_name]
        for name, variable_name in variable_by_setting.items()
        if environ.get(variable_name)
    }
    effective_overrides = {name: override for name, override in overrides.items() if override is not None}

    def file_origin_of_setting(setting_name: str) -> str:
        is_above = setting_name in file.document and setting_name not in file.document.get(section_name, {})
        return str(file.path) if is_above or not section_name else f"{file.path} [{section_name}]"

    def origin_of_setting(setting_name: str) -> str:
        if setting_name in effective_overrides or file.path is None:
            return "" if setting_name in effective_overrides else variable_by_setting.get(setting_name, "")
        return (
            variable_by_setting[setting_name]
            if setting_name in environment_values
            else file_origin_of_setting(setting_name)
        )

    _refuse_secrets(file_values, file_origin_of_setting)
    file_arguments = _section_arguments(field_by_name, file_values, file, origin_of_setting)
    for name in PATH_SETTINGS & environment_values.keys():
        if "://" not in environment_values[name]:
            environment_values[name] = str(Path(environment_values[name]).absolute())
    field_definitions: dict[str, Any] = {
        name: (field_info.annotation, field_info) for name, field_info in field_by_name.items()
    }
    settings_class: type[_Settings] = create_model(section_class.__name__, __base__=_Settings, **field_definitions)
    sources = (
        InitSettingsSource(settings_class, effective_overrides),
        _Environment(settings_class, environment_values),
        InitSettingsSource(settings_class, file_arguments),
    )
    try:
        merged_settings = settings_class(_build_sources=(sources, {}))  # type: ignore[call-arg]  # sources of its own
        return section_class(**{name: getattr(merged_settings, name) for name in field_by_name})
    except ValidationError as error:
        raise _with_setting_origin(refusal(error, section_class), origin_of_setting) from None
    except ConfigError as error:
        raise _with_setting_origin(error, origin_of_setting) from error


def _section_arguments(
    field_by_name: Mapping[str, FieldInfo],
    file_values: Mapping[str, Any],
    file: ConfigFile,
    origin_of_setting: Callable[[str], str],
) -> dict[str, Any]:
    """Convert the file's values to constructor arguments; relative paths and default paths start at its folder."""
    if "base" in file_values:
        raise ConfigError(f"{origin_of_setting('base')}: unknown setting 'base'", field="base")
    file_arguments = {
        name: _build_sections(field_by_name[name].annotation, setting, f"{origin_of_setting(name)} [{name}]")
        if name in field_by_name
        else setting
        for name, setting in file_values.items()
    }
    if "base" in field_by_name and file.path:
        file_arguments["base"] = str(file.path.parent)
    for name in PATH_SETTINGS & field_by_name.keys():
        if isinstance(path := file_arguments.get(name, field_by_name[name].default), str) and path:
            file_arguments[name] = file.resolve_path(path)
    return file_arguments


def _with_setting_origin(error: ConfigError, origin_of_setting: Callable[[str], str]) -> ConfigError:
    setting_origin = origin_of_setting(str(error.details.get("field", "")))
    return ConfigError(f"{setting_origin}: {error.message}" if setting_origin else error.message, **error.details)


def _refuse_secrets(file_values: Mapping[str, Any], origin_of_setting: Callable[[str], str]) -> None:
    for name in file_values.keys() & SECRET_SETTINGS:
        if name == "token" or mask_secrets(str(file_values[name])) != str(file_values[name]):
            raise ConfigError(
                f"{origin_of_setting(name)}: {name} with a password or token is read from the environment only: set "
                f"{environment_variable(name)}",
                field=name,
            )


def _build_sections(setting_annotation: Any, file_value: Any, setting_origin: str) -> Any:
    """Build the nested sections of a file's value; lists and times are kept as plain values."""
    if is_section(setting_annotation):
        if not isinstance(file_value, Mapping):
            raise ConfigError(f"{setting_origin} must be a section of settings, not {file_value!r}")
        try:
            return setting_annotation(**{name: _normalise_value(setting) for name, setting in file_value.items()})
        except ConfigError as error:
            raise ConfigError(f"{setting_origin}: {error.message}", **error.details) from error
    if get_origin(setting_annotation) is dict:
        if not isinstance(file_value, Mapping):
            name = setting_origin.rpartition("[")[2][:-1]
            raise ConfigError(
                f"{setting_origin.partition(' [')[0]}: {name} must hold one section per table, "
                f"e.g. [{name}.user_topk], "
                f"not {file_value!r}"
            )
        section_class = get_args(setting_annotation)[1]
        return {
            name: _build_sections(section_class, raw_section, f"{setting_origin[:-1]}.{name}]")
            for name, raw_section in file_value.items()
        }
    return _normalise_value(file_value)


def _normalise_value(file_value: Any) -> Any:
    if isinstance(file_value, list):
        return tuple(file_value)
    return file_value.isoformat() if isinstance(file_value, date) else file_value
