"""A look at the first rows of interactions with the eyes of a night."""

from collections.abc import Collection
from itertools import islice
from pathlib import Path

from cache.config.sections import Sources
from cache.errors import LarderError
from precompute.sources.formats import INTERACTIONS
from precompute.sources.plausibility import Shape, odd_in_words
from precompute.sources.readers import read_interactions
from precompute.sources.unusable import HEADER, UnusableRows, remedy


def first_rows_in_words(
    sources: Sources, base: Path, reported_reasons: Collection[str] = (HEADER,)
) -> list[str]:
    """Sentences on what a night makes of the first rows: that it refuses them, which it leaves out, how it reads them.

    Empty where it reads them all as they are. Reasons that were `reported_reasons` already are left out.
    """
    unusable, odd = UnusableRows(), list[str]()
    try:
        for rows in islice(read_interactions(sources, base, unusable=unusable), 1):
            shape = Shape.of_batch(rows)
            # Lists in fields were told by the look at the columns already.
            odd = [] if shape.holds_lists else odd_in_words(shape)
    except LarderError as error:
        return [f"a night refuses the interactions: {error.message}"]
    report = unusable.to_json().get(INTERACTIONS, {})
    reasons = report.get("reasons", {})
    left_out = [
        f"of the first {report['rows']:,} rows, {reason['rows']:,} cannot be used: {reason_text}{remedy(reason_text)}"
        for reason_text, reason in reasons.items()
        if reason_text not in reported_reasons
    ]
    return [*left_out, *unusable.remarks(INTERACTIONS), *odd]
