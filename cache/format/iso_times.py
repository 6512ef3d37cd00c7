"""Times of ISO 8601 as callers and files write them."""

from datetime import UTC, datetime


def iso_time(text: str) -> datetime:
    """The time with its zone, UTC where none is given or where it ends in ` UTC`, as BigQuery writes it.

    Raises ValueError for what is no time.
    """
    time = datetime.fromisoformat(text.removesuffix(" UTC"))
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time
