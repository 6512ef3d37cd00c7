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

API_PAGE: Final = Path(__file__).parents[1] / "docs/reference/http-api.md"
_SECTION_PATTERN = re.compile(r"(<!-- begin (\w+): [^\n]*-->\n)(.*?)(\n\n<!-- end \2 -->)", re.DOTALL)


def _markdown_table(header_cells: tuple[str, ...], row_cells: Iterable[tuple[str, ...]]) -> str:
    table_lines = [f"| {' | '.join(cells)} |" for cells in (header_cells, *row_cells)]
    return "\n".join([table_lines[0], "|" + "---|" * len(header_cells), *table_lines[1:]])


def _operations() -> tuple[Operation, ...]:
    return (*sorted_by_tag(all_operations(request_limits(ServingConfig()))), *PROBES)


def _enum_table(field_name: str, described_values: Iterable[tuple[str, str]]) -> str:
    return _markdown_table(
        (f"`{field_name}`", "says"), ((f"`{field_value}`", meaning) for field_value, meaning in described_values)
    )


def generated_sections() -> Mapping[str, str]:
    """Return the generated parts of the page, by name."""
    return {
        "routes": _markdown_table(
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
        "options": _markdown_table(
            ("option", "meaning"),
            (
                (f"`{option_name}`", option_schema["description"])
                for option_name, option_schema in QUERY_OPTION_SCHEMAS.items()
            ),
        ),
        "reason": _enum_table("reason", ((miss_reason, miss_reason.meaning) for miss_reason in PUBLIC_MISS_REASONS)),
        "live": _enum_table("live", ((live_reason, live_reason.meaning) for live_reason in LiveReason)),
        "stale": _enum_table("stale", ((stale_reason, stale_reason.meaning) for stale_reason in StaleReason)),
        "codes": _markdown_table(
            ("status", "code", "meaning"),
            (
                (str(error.http_status), f"`{code}`", error.meaning)
                for code, error in refusal_codes(_operations()).items()
            ),
        ),
    }


def page_with_sections(page_text: str) -> str:
    """Return the page with its generated parts replaced."""
    section_by_name = generated_sections()
    return _SECTION_PATTERN.sub(
        lambda section_match: section_match[1] + section_by_name[section_match[2]] + section_match[4], page_text
    )


def main(arguments: list[str]) -> int:
    """Return 0 if the page is up to date or was written, else 1."""
    if arguments == ["--document"]:
        limits = request_limits(ServingConfig())
        print(json.dumps(openapi_document(all_operations(limits), has_tokens=True), indent=1))
        return 0
    page_text = API_PAGE.read_text()
    current_text = page_with_sections(page_text)
    if arguments == ["--write"]:
        API_PAGE.write_text(current_text)
        return 0
    return int(page_text != current_text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
