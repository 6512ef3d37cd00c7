"""Tables of the page about the HTTP API, from the declarations: `python -m serving.reference --write`.

With `--document` it prints the OpenAPI document of a service with default settings and tokens.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from serving.config.settings import ServingConfig, request_limits
from serving.features import all_operations
from serving.http.openapi import PROBES, Operation, openapi_document, refusal_codes, sorted_by_tag
from serving.http.schemas import QUERY_OPTION_SCHEMAS
from serving.requests.reasons import PUBLIC_MISS_REASONS, LiveReason, StaleReason

PAGE: Final = Path(__file__).parents[1] / "docs/reference/http-api.md"
_SECTION = re.compile(r"(<!-- begin (\w+): [^\n]*-->\n)(.*?)(\n\n<!-- end \2 -->)", re.DOTALL)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _operations() -> tuple[Operation, ...]:
    return (*sorted_by_tag(all_operations(request_limits(ServingConfig()))), *PROBES)


def _enum_table(field: str, described_values: Iterable[tuple[str, str]]) -> str:
    return _table(
        (f"`{field}`", "says"),
        ((f"`{field_value}`", meaning) for field_value, meaning in described_values),
    )


def sections() -> Mapping[str, str]:
    """Return the generated parts of the page, by name."""
    return {
        "routes": _table(
            ("request", "answers", "scope"),
            (
                (
                    f"`{operation.method.upper()} {operation.path}`",
                    operation.summary,
                    f"`{operation.scope}`" if operation.scope else "none",
                )
                for operation in _operations()
            ),
        ),
        "options": _table(
            ("option", "meaning"),
            ((f"`{name}`", schema["description"]) for name, schema in QUERY_OPTION_SCHEMAS.items()),
        ),
        "reason": _enum_table(
            "reason", ((miss_reason, miss_reason.meaning) for miss_reason in PUBLIC_MISS_REASONS)
        ),
        "live": _enum_table(
            "live", ((live_reason, live_reason.meaning) for live_reason in LiveReason)
        ),
        "stale": _enum_table(
            "stale", ((stale_reason, stale_reason.meaning) for stale_reason in StaleReason)
        ),
        "codes": _table(
            ("status", "code", "meaning"),
            (
                (str(error.status), f"`{code}`", error.meaning)
                for code, error in refusal_codes(_operations()).items()
            ),
        ),
    }


def written(page: str) -> str:
    """Return the page with its generated parts made anew."""
    parts = sections()
    return _SECTION.sub(
        lambda section_match: section_match[1] + parts[section_match[2]] + section_match[4], page
    )


def main(arguments: list[str]) -> int:
    """Exit code: 0 the page is as it should be, or was written; 1 it is not."""
    if arguments == ["--document"]:
        limits = request_limits(ServingConfig())
        print(json.dumps(openapi_document(all_operations(limits), has_tokens=True), indent=1))
        return 0
    page = PAGE.read_text()
    current = written(page)
    if arguments == ["--write"]:
        PAGE.write_text(current)
        return 0
    return int(page != current)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
