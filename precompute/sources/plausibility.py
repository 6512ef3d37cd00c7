"""What interactions are like: figures that `begin` counts once, and what looks odd about them, in words.

Nothing of this refuses a night: a person may know why it is right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from precompute.sources.readers import Interactions

JUDGED_ROWS: Final = 20
"""Rows below which shares of rows say nothing."""
ONE_ID_SHARE: Final = 0.2
"""Share of all rows that one user, or one item, seldom has: such an id often stands for a missing one."""
ONCE_SHARE: Final = 0.9
"""Share of distinct items among rows from which on nearly each item comes once."""
LISTS_SHARE: Final = 0.9
OLDEST_US: Final = int(datetime(1990, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
"""Times that are all older were written in another unit than they are read in."""
FEW_USERS: Final = 100
FEW_ITEMS: Final = 20
"""Numbers of users and items below which the shares that gates judge vary by chance."""
LEAST_USERS: Final = 2
LEAST_ITEMS: Final = 2
"""Numbers of users and items below which there is nothing to learn and nothing to recommend."""
_SEVERAL_WORDS: Final = r"\S[\s,;|]+\S"


def hold_lists(texts: Any) -> bool:
    """True if a column of ids seems to hold several ids in each field: none comes twice, and nearly all have blanks."""
    if not (pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)):
        return False
    if len(texts) < JUDGED_ROWS or pc.count_distinct(texts).as_py() < len(texts):
        return False
    several = pc.sum(pc.match_substring_regex(texts, _SEVERAL_WORDS)).as_py() or 0
    return bool(several >= LISTS_SHARE * len(texts))
