"""Check of what a person must say with a command."""

from cache.errors import ConfigError


def demand_reason(action: str, reason: str | None) -> str:
    """The reason without space around it; raises ConfigError for one that says nothing."""
    if not (reason or "").strip():
        raise ConfigError(
            f"{action} demands a reason (--reason): it is kept in the record", field="reason"
        )
    return str(reason).strip()
