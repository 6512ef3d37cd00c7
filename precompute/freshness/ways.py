"""Ways of keeping lists fresh that a replay compares."""

from dataclasses import dataclass
from typing import Final

HOUR_S: Final = 3_600
DAY_S: Final = 24 * HOUR_S


@dataclass(frozen=True, slots=True)
class RefreshStrategy:
    """Way of keeping lists fresh: every `period_s` they are computed from all that happened before, 0: at once.

    With `leaves_out` a list is answered less the items that its user has had since.
    """

    name: str
    text: str
    period_s: int
    leaves_out: bool = False


NIGHT: Final = RefreshStrategy("night", "a night a day", DAY_S)
NIGHT_LESS_SEEN: Final = RefreshStrategy(
    "night_less", "a night a day, less newer items", DAY_S, leaves_out=True
)
HOURLY: Final = RefreshStrategy("hourly", "a night an hour", HOUR_S)
EVENTS: Final = RefreshStrategy("events", "events", 0)

STRATEGIES: Final = (NIGHT, NIGHT_LESS_SEEN, HOURLY, EVENTS)
"""All ways; the first is what the others are compared with."""
