"""A night that copies, foretold: the lists that a day's changes touch, and the scoring that is left. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from math import exp, lgamma
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from precompute.planning.sampling import Sample
from precompute.planning.sizes import NightShape
from precompute.planning.spent import TimeSpent
from precompute.planning.trial import Timings
from precompute.reuse.lists import ENTERING_MAX
from precompute.sources.moments import MICROSECONDS

ITEMS_CHANGED: Final = (0.0, 0.001, 0.01)
"""Shares of the items for which a plan shows a night, where none is stated."""
USERS_CHANGED: Final = 0.1
"""Share of the users that is taken where none is stated and the sources have no times."""
_DAY_US = 86_400 * MICROSECONDS


@dataclass(frozen=True, slots=True)
class CopyingNight:
    """A night after one that it copies from; shares of the users by the reason for which they are computed.

    With a share of the items these are bounds: as if all of it had left the histories and lists it was in, and as many
    new items had come into others.
    """

    items_changed: float
    inputs: float
    lost: float
    entered: float
    scoring: TimeSpent

    @property
    def copied(self) -> float:
        """Share of the users that is copied, at least."""
        return max(0.0, 1 - self.inputs - self.lost - self.entered)

    def to_json(self) -> dict[str, Any]:
        """JSON-able form for `--json`."""
        fields = asdict(self)
        wall_s, cpu_s = fields.pop("scoring")
        return {**fields, "copied": self.copied, "scoring_s": wall_s, "scoring_cpu_s": cpu_s}


def users_changed(
    stated: float | None, sample: Sample, cutoff_at: datetime | None
) -> tuple[float, str]:
    """(share of the users that a night finds changed, in words how it is known)."""
    if stated is not None:
        return stated, f"{stated:.1%} of the users changed, as stated"
    active_share = active_lately(sample, cutoff_at)
    if active_share is None:
        return (
            USERS_CHANGED,
            f"{USERS_CHANGED:.1%} of the users changed: assumed, nothing has a time",
        )
    return (
        active_share,
        f"{active_share:.1%} of the users did something in the last day before the cut",
    )


def active_lately(sample: Sample, cutoff_at: datetime | None) -> float | None:
    """Share of the sample's users with an interaction in the last day before the cut; None where there are no times.

    Without a cut the day ends with the newest interaction.
    """
    if not (sample.times > 0).any():
        return None
    data_end_us = int(sample.times.max()) + 1
    end = data_end_us if cutoff_at is None else int(cutoff_at.timestamp() * MICROSECONDS)
    lately = sample.owners[sample.times >= end - _DAY_US]
    return len(np.unique(lately)) / len(sample.ids)


def touched(items: int, changed_share: float, width: int) -> float:
    """Share of the lists of `width` items that hold an item of any `changed_share` of all `items`.

    1 - C(items - changed, width) / C(items, width): 1 - (1 - changed) ** width where a list is short beside the items.
    """
    changed_count, width = changed_share * items, min(width, items)
    if changed_count + width > items:
        return 1.0 if changed_count and width else 0.0
    log_unchanged_ways = lgamma(items - changed_count + 1) - lgamma(
        items - changed_count - width + 1
    )
    return 1 - exp(log_unchanged_ways + lgamma(items - width + 1) - lgamma(items + 1))


def copying_night(
    timings: Timings,
    shape: NightShape,
    users_changed: float,
    items_changed: float,
    histories: NDArray[np.int64],
) -> CopyingNight:
    """The night after one that it copies from, in which these shares of the users and of the items changed.

    `histories` int64 are the numbers of different items that some users had: with one that is gone, inputs differ.
    """
    lost_share, entered = _computed(shape, "user", items_changed)
    touched_history_share = _mean_touched(shape.items, items_changed, histories)
    stay = (1 - users_changed) * (1 - touched_history_share)
    inputs, lost_share, entered = 1 - stay, stay * lost_share, stay * entered
    computed = inputs + lost_share + entered
    # Who an item may enter is told by the vectors of all users.
    remaining_share_by_stage = {
        "tower": 1.0 if items_changed else inputs,
        "topk": min(1.0, computed + items_changed * (1 - computed)),
    }
    busy = timings.stages
    of_users = sum(remaining_share_by_stage.get(name, 1.0) * busy[name] for name in busy) / max(
        sum(busy.values()), 1e-9
    )
    of_items = min(1.0, items_changed + sum(_computed(shape, "item", items_changed)))
    scoring = timings.prepare.and_(timings.shards).and_(timings.embed.times(items_changed))
    scoring = scoring.and_(timings.users.times(of_users)).and_(timings.items.times(of_items))
    return CopyingNight(items_changed, inputs, lost_share, entered, scoring)


def copying_nights(
    timings: Timings,
    shape: NightShape,
    users_changed: float,
    items_changed: float | None,
    histories: NDArray[np.int64],
) -> Sequence[CopyingNight]:
    """The night for the share of items that is stated, else one for each of ITEMS_CHANGED."""
    changed_shares = ITEMS_CHANGED if items_changed is None else (items_changed,)
    return [
        copying_night(timings, shape, users_changed, changed_share, histories)
        for changed_share in changed_shares
    ]


def lengths(sample: Sample) -> NDArray[np.int64]:
    """Numbers of different items that each user of the sample had; int64 [users]."""
    if not len(sample.owners):
        return np.zeros(len(sample.ids), np.int64)
    items = np.asarray(pc.dictionary_encode(sample.items).indices, np.int64)
    pairs = np.unique(sample.owners * (int(items.max()) + 1) + items)
    return np.bincount(pairs // (int(items.max()) + 1), minlength=len(sample.ids))


def _mean_touched(items: int, changed_share: float, widths: NDArray[np.int64]) -> float:
    distinct_widths, counts = np.unique(widths, return_counts=True)
    touched_shares = [touched(items, changed_share, width) for width in distinct_widths.tolist()]
    return float(np.dot(touched_shares, counts)) / max(1, len(widths))


def _computed(shape: NightShape, entity: str, changed_share: float) -> tuple[float, float]:
    """(lists that lose an item, lists besides that one may enter) as shares of the lists of users, or of items."""
    width = sum(
        layout.width
        for of, layout in shape.layouts.values()
        if of == entity and layout.kind == "topk"
    )
    lost_share = touched(shape.items, changed_share, width)
    # A new item is as likely in a list as any, so as many lists are entered as are left.
    entered = 1.0 if changed_share > ENTERING_MAX and width else lost_share
    return lost_share, (1 - lost_share) * entered
