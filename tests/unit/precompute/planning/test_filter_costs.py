"""Costs of tables under filters: from how many lookups a day one pays, and which lists fall short."""

from dataclasses import replace

import numpy as np
import pytest

from cache.records import NO_ITEM
from precompute.planning.command import _break_even_in_words
from precompute.planning.filter_costs import FilterCost, _short_list_shares

COST = FilterCost(
    "user_topk.cheap", is_made_by_night=False, passing_item_count=10, page_count=3, redis_bytes=1_000, night_cpu_s=60.0,
    short_list_share=0.5, short_list_share_at_ten=0.1, search_cpu_s=0.0019, read_cpu_s=0.0001,
)  # fmt: skip


def test_it_pays_from_the_lookups_whose_searches_take_as_long_as_the_night() -> None:
    assert COST.pays_from_lookups == pytest.approx(60_000)
    assert replace(COST, short_list_share=1.0).pays_from_lookups == pytest.approx(30_000)
    never = replace(COST, short_list_share=0.0)
    assert never.to_json()["pays_from_lookups_a_day"] is None
    assert _break_even_in_words(never, 10.0) == "never: no list is too short"


def test_break_even_is_compared_with_the_stated_requests() -> None:
    assert _break_even_in_words(COST, None) == "from 60,000 lookups a day"
    assert _break_even_in_words(COST, 1.0) == "from 60,000 lookups a day, 69.44% of those stated"
    assert _break_even_in_words(COST, 0.1) == "from 60,000 lookups a day: more than those stated"
    assert _break_even_in_words(replace(COST, is_made_by_night=True), None) == "from 60,000 lookups a day (made)"


def test_a_full_list_of_which_too_few_pass_is_short_and_one_that_is_not_full_is_whole() -> None:
    lists = np.array([range(12), range(6, 18), [*range(6), *[NO_ITEM] * 6]], np.uint32)
    mask = np.arange(20) < 10

    cut_share, cut_few_share = _short_list_shares(lists, mask)

    assert cut_share == pytest.approx(2 / 3)
    assert cut_few_share == pytest.approx(1 / 3)
