"""Parts that the commands of all packages share: an exit code, and JSON for programs."""

from typing import Any, Final

import orjson

NOT_WELL: Final = 3
"""Exit code of a command that did what it should, and found something that is not as it should be."""


def json_text(document: Any) -> str:
    """JSON by which a command tells a program what it found; a person can read it as well."""
    return orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
