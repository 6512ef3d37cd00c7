"""The held-out sample: bounded, the same in any order, and there even when nothing is newer than the cut."""

import numpy as np
import pyarrow as pa

from precompute.partitions.holdout import HOLDOUT_ITEMS_MAX, Holdout, read_holdout
from precompute.sources.columns import Ids
from precompute.sources.readers import Interactions


def batch(users, items):
    named, item_ids = (Ids.of(pa.array(texts, pa.string())) for texts in (users, items))
    return Interactions(named, item_ids, np.zeros(len(users), np.int64))


def test_many_users_are_cut_down_to_the_same_sample_in_any_order(tmp_path):
    users = [f"user-{number}" for number in range(500)]
    holdouts = []
    for name, order in (("a", users), ("b", users[::-1])):
        holdout = Holdout(users_max=20)
        for start in range(0, 500, 50):
            holdout.add(batch(order[start : start + 50], ["x"] * 50))
        holdout.write(tmp_path / name)
        holdouts.append(read_holdout(tmp_path / name))

    assert len(holdouts[0]) == 20 and holdouts[0] == holdouts[1]


def test_a_user_keeps_a_bounded_number_of_different_items(tmp_path):
    holdout = Holdout()
    items = [str(number) for number in range(HOLDOUT_ITEMS_MAX + 30)]
    holdout.add(batch(["user"] * len(items) * 2, items * 2))
    holdout.write(tmp_path)

    assert len(read_holdout(tmp_path)["user"]) == HOLDOUT_ITEMS_MAX


def test_nothing_newer_than_the_cut_is_written_down_as_nothing(tmp_path):
    Holdout().write(tmp_path)

    assert read_holdout(tmp_path) == {}


def test_a_holdout_that_is_restarted_knows_nothing_of_before(tmp_path):
    holdout = Holdout(users_max=1)
    holdout.add(batch(["a", "b", "c"], ["x", "y", "z"]))
    holdout.restart()
    holdout.add(batch(["b"], ["w"]))
    holdout.write(tmp_path)

    assert read_holdout(tmp_path) == {"b": ["w"]}
