"""Cut of a night: refused before hours of work that could not be published, or would keep later nights from it."""

from datetime import datetime
from typing import Final

from cache.errors import ConfigError
from cache.format.manifest import CUT_CHARS
from precompute.releases.release_log import ReleaseLog

CUT_FORMAT: Final = "%Y%m%dT%H%M%SZ"
"""Format of a generation id's beginning: its cut, in UTC, so older data sorts first."""
CLOCKS_DIFFER_S: Final = 300.0
"""Seconds by which the clock of whoever chose a cut may be ahead of Redis'."""


def demand_publishable(releases: ReleaseLog, cut: datetime, *, is_chosen: bool) -> None:
    """Raises ConfigError for a cut that no publish would accept, or that would keep all nights after it from theirs.

    A scheduler's time is never far ahead, and if its clock is wrong its nights are better than none.
    """
    ahead_s = cut.timestamp() - releases.clock()
    if is_chosen and ahead_s > CLOCKS_DIFFER_S:
        raise ConfigError(
            f"data_until {cut.isoformat()} is {ahead_s:,.0f} s ahead of Redis' clock: until then no night could be "
            "published after this one; give a time that has passed",
            field="data_until",
        )
    live = releases.ledger().live
    if live is not None and f"{cut:{CUT_FORMAT}}" < live[:CUT_CHARS]:
        raise ConfigError(
            f"data_until {cut.isoformat()} is older than {live}, which is live, so it could not be published: give a "
            "newer one, or go back with `larder roll-back`",
            field="data_until",
            live=live,
        )
