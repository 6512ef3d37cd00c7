"""Response facts read from the body's bytes: exact, since no text in JSON holds an unescaped quote. Pure."""

import re

from serving.answers.sources import Source

_GENERATION = re.compile(rb'"generation":"([^"\\]+)"')


def sources_of(body: bytes) -> dict[str, int]:
    """Answers by source; empty for what is not JSON."""
    counts = {each.value: body.count(b'"source":"%b"' % each.encode()) for each in Source}
    return {each: count for each, count in counts.items() if count}


def generation_of(body: bytes) -> str | None:
    """The generation of the first answer."""
    found = _GENERATION.search(body)
    return None if found is None else found[1].decode(errors="replace")
