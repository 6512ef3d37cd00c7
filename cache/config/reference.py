"""The reference page of `larder.toml`: `python -m cache.config.reference > docs/reference/configuration.md`."""

import sys
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cache.config.night import NightConfig
from cache.config.section import (
    bounds_in_words,
    fields_of,
    meaning,
    sections_of,
    type_in_words,
    variables,
)
from cache.config.serving import ServingConfig
from cache.config.shared import Shared

_START = """\
# Configuration

Every setting of `larder.toml`, the file that `LARDER_CONFIG` names; made by `python -m cache.config.reference`. The
file goes over the defaults, the environment over the file, the command line over both; an empty variable is unset.
Paths in the file are relative to it, those in the environment to the current folder. Unknown names are refused. Secrets
(the token, a Redis URL with a password) stand in the environment alone. Variables that are no settings:
[infra/ENVIRONMENT.md](../../infra/ENVIRONMENT.md).
"""


def page() -> str:
    """The page as Markdown."""
    inherited, own = fields_of(Shared), sections_of(NightConfig)
    above = {name: each for name, each in fields_of(NightConfig).items() if name not in own}
    nights = {name: each for name, each in above.items() if name not in inherited}
    serving = {
        name: each for name, each in fields_of(ServingConfig).items() if name not in inherited
    }
    parts = [
        _START,
        *_part("Above the sections: night and service", "", inherited, variables(Shared)),
        *_part("Above the sections: the night", "", nights, variables(NightConfig)),
    ]
    for name, kind in own.items():
        title = "`[tables.NAME]`" if name == "tables" else f"`[{name}]`"
        parts += _part(title, kind.__doc__, fields_of(kind), variables(kind))
    parts += _part("`[serving]`", ServingConfig.__doc__, serving, variables(ServingConfig))
    return "\n".join(parts)


def _part(
    title: str, told: str | None, fields: dict[str, FieldInfo], names: dict[str, str]
) -> Iterator[str]:
    yield f"## {title}\n"
    if told:
        yield "\n".join(line.strip() for line in told.strip().splitlines()) + "\n"
    yield "| key | type | default | bounds | environment | meaning |\n|---|---|---|---|---|---|"
    for name, each in fields.items():
        cells = (
            f"`{name}`",
            type_in_words(each.annotation),
            _default(each),
            bounds_in_words(each),
            f"`{names[name]}`" if name in names else "",
            meaning(each),
        )
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if value is PydanticUndefined:
        return "must be given"
    if value is None or value in ("", ()):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(page())
