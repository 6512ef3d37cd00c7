"""The reference page of `larder.toml`: `python -m cache.config.reference > docs/reference/configuration.md`."""

import sys
from collections.abc import Collection, Iterator
from typing import Any, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cache.config.night import NightConfig
from cache.config.section import bounds_in_words, fields_of, meanings, sections_of, type_in_words, variables
from cache.config.serving import ServingConfig
from cache.config.shared import SharedConfig

_PAGE_START = """\
# Configuration

Every setting of `larder.toml`, the file that `LARDER_CONFIG` names; made by `python -m cache.config.reference`. The
file goes over the defaults, the environment over the file, the command line over both; an empty variable is unset.
Paths in the file are relative to it, those in the environment to the current folder. Unknown names are refused. Secrets
(the token, a URL with a password) stand in the environment alone. Variables that are no settings:
[infra/ENVIRONMENT.md](../../infra/ENVIRONMENT.md).
"""


def reference_page() -> str:
    """The page as Markdown."""
    shared_sections, night_sections = sections_of(SharedConfig), sections_of(NightConfig)
    inherited_settings = fields_of(SharedConfig).keys() - shared_sections.keys()
    page_lines = [
        _PAGE_START,
        *_section_lines("Above the sections: night and service", SharedConfig, inherited_settings),
        *_section_lines(
            "Above the sections: the night",
            NightConfig,
            fields_of(NightConfig).keys() - inherited_settings - night_sections.keys(),
        ),
    ]
    repeated_sections = {name for name, field in fields_of(NightConfig).items() if get_origin(field.annotation) is dict}
    for name, kind in night_sections.items():
        page_lines += _section_lines(
            f"`[{name}.NAME]`" if name in repeated_sections else f"`[{name}]`", kind, fields_of(kind)
        )
    serving_sections = sections_of(ServingConfig)
    setting_names = fields_of(ServingConfig).keys() - inherited_settings - serving_sections.keys()
    page_lines += _section_lines("`[serving]`", ServingConfig, setting_names)
    for name, kind in serving_sections.items():
        if name not in shared_sections:
            page_lines += _section_lines(f"`[serving.{name}.TABLE]`", kind, fields_of(kind))
    return "\n".join(page_lines)


def _section_lines(title: str, kind: type[Any], setting_names: Collection[str]) -> Iterator[str]:
    meaning_by_setting, variable_by_setting = meanings(kind), variables(kind)
    section_text = "" if title.startswith("Above") else str(kind.__doc__)
    yield f"## {title}\n"
    if section_text:
        yield "\n".join(line.strip() for line in section_text.strip().splitlines()) + "\n"
    yield "| key | type | default | bounds | environment | meaning |\n|---|---|---|---|---|---|"
    for name, field in fields_of(kind).items():
        if name not in setting_names:
            continue
        cells = (
            f"`{name}`",
            type_in_words(field.annotation),
            _default_text(field),
            bounds_in_words(field),
            f"`{variable_by_setting[name]}`" if name in variable_by_setting else "",
            meaning_by_setting[name],
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _default_text(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "must be given"
    if value is None or value in ("", (), {}):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
