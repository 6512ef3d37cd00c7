"""Targets of a replay: items that users took up after the cut, and how far each way's history reaches by then. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cache.errors import SourceError
from precompute.freshness.timed_log import TimedLog
from precompute.freshness.ways import DAY_S, EVENTS, NIGHT, RefreshStrategy
from precompute.sources.moments import MICROSECONDS

_DAY_US = DAY_S * MICROSECONDS


def cut_before_days(log: TimedLog, days: int) -> int:
    """Microseconds since 1970 at which the last `days` days (UTC) of the log begin, the day of its last row included.

    Raises SourceError where nothing is left before that.
    """
    first, last = int(log.times.min()), int(log.times.max())
    cut = (last // _DAY_US - days + 1) * _DAY_US
    if first >= cut:
        raise SourceError(
            f"the log spans {(last - first) / _DAY_US:.1f} days: too short to replay its last {days} and to train on "
            "what is before; take fewer --days, or a longer log",
            days=days,
        )
    return cut


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """Items to be found, each in the list that its user would get right before: int64 [targets] each.

    `users` are numbered anew from 0, `starts` is where the user's rows of the log start. By way, `ends` is where the
    rows end that its lists are computed from.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: Mapping[RefreshStrategy, NDArray[np.int64]]
    since_night_us: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        log: TimedLog,
        cut_us: int,
        ways: Sequence[RefreshStrategy],
        users_max: int,
        rng: np.random.Generator,
    ) -> Self:
        """Finds what users did for the first time after the cut; of more than `users_max` users so many are drawn.

        Rows of one moment know nothing of each other. Raises SourceError where there are none.
        """
        pairs = log.users * (int(log.items.max(initial=0)) + 1) + log.items
        is_first = np.zeros(len(log), np.bool_)
        is_first[np.unique(pairs, return_index=True)[1]] = True
        rows = np.flatnonzero(is_first & (log.times >= cut_us))
        active_users = np.unique(log.users[rows])
        if not len(active_users):
            raise SourceError(
                "nobody in the log did anything new after the cut with an item that was known before: take more "
                "--days, or a longer log"
            )
        if len(active_users) > users_max:
            active_users = np.sort(rng.choice(active_users, users_max, replace=False))
            rows = rows[np.isin(log.users[rows], active_users)]
        users, times = log.users[rows], log.times[rows]
        distinct, ranks = np.unique(log.times, return_inverse=True)
        keys = log.users * (len(distinct) + 1) + ranks

        def end(refresh_policy: RefreshStrategy) -> NDArray[np.int64]:
            cutoff_times = computed_at(times, cut_us, refresh_policy)
            search_keys = users * (len(distinct) + 1) + distinct.searchsorted(cutoff_times)
            return np.asarray(keys.searchsorted(search_keys), np.int64)

        return cls(
            np.searchsorted(active_users, users),
            log.items[rows],
            log.users.searchsorted(users),
            {refresh_policy: end(refresh_policy) for refresh_policy in ways},
            times - computed_at(times, cut_us, NIGHT),
        )

    def __len__(self) -> int:
        return len(self.users)

    @property
    def is_known(self) -> NDArray[np.bool_]:
        """Mask of the targets whose user the last night knew."""
        return np.asarray(self.ends[NIGHT] > self.starts)

    @property
    def has_newer(self) -> NDArray[np.bool_]:
        """Mask of the targets whose user did something since the last night."""
        return np.asarray(self.ends[EVENTS] > self.ends[NIGHT])


def computed_at(
    times: NDArray[np.int64], cut_us: int, refresh_policy: RefreshStrategy
) -> NDArray[np.int64]:
    """Time before which everything is in the lists that are answered at `times`, microseconds each."""
    if not refresh_policy.period_s:
        return times
    period_us = refresh_policy.period_s * MICROSECONDS
    return cut_us + (times - cut_us) // period_us * period_us


def lists_per_day(
    log: TimedLog, cut_us: int, refresh_policy: RefreshStrategy
) -> tuple[float, float | None]:
    """Lists a day after the cut: (of users who did something since their last, of all known users; None by events)."""
    after = log.times >= cut_us
    days = (int(log.times.max()) + 1 - cut_us) / _DAY_US
    users, times = log.users[after], log.times[after]
    periods = (
        times
        if not refresh_policy.period_s
        else (times - cut_us) // (refresh_policy.period_s * MICROSECONDS)
    )
    order = np.lexsort((periods, users))
    users, periods = users[order], periods[order]
    is_new = (users[1:] != users[:-1]) | (periods[1:] != periods[:-1])
    changed_per_day = (len(users) and 1 + int(is_new.sum())) / days
    if not refresh_policy.period_s:
        return changed_per_day, None
    first_times = np.sort(log.times[np.flatnonzero(np.diff(log.users, prepend=-1))])
    nights = np.arange(cut_us, int(log.times.max()) + 1, refresh_policy.period_s * MICROSECONDS)
    return changed_per_day, float(first_times.searchsorted(nights).sum()) / days
