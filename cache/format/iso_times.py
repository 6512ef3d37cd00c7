"""Parser of ISO 8601 times."""

from datetime import UTC, datetime


def iso_time(time_text: str) -> datetime:
    """Parse a time with its zone; UTC without one or with the ending ` UTC`, as BigQuery writes it.

    Raises ValueError for a text that is no time.
    """
    time = datetime.fromisoformat(time_text.removesuffix(" UTC"))
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time
