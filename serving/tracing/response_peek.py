"""Facts read from the bytes of a JSON response; exact, since texts in JSON contain no unescaped quotes. Pure."""

import re

from serving.requests.answers import Source

_GENERATION_PATTERN = re.compile(rb'"generation":"([^"\\]+)"')


def count_sources(response_body: bytes) -> dict[str, int]:
    """Count answers by source; empty for a body that is not JSON."""
    count_by_source = {source.value: response_body.count(b'"source":"%b"' % source.encode()) for source in Source}
    return {source: count for source, count in count_by_source.items() if count}


def find_generation(response_body: bytes) -> str | None:
    """Return the generation of the first answer."""
    generation_match = _GENERATION_PATTERN.search(response_body)
    return None if generation_match is None else generation_match[1].decode(errors="replace")
