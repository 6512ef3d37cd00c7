"""The fact of copies in a manifest: read as it is written, and left alone where another version wrote it."""

from typing import Any

import pytest

from cache.reuse import REUSE_FACT, REUSE_NIGHTS_MAX, REUSE_REASONS, Reuse

USERS = {"copied": 90, "inputs": 6, "lost": 3, "entered": 1, "computed": 0}


def make_facts(**changes: Any) -> dict[str, Any]:
    night = {"users": USERS, "spared_s": 4.5}
    fact = {"base": "g", "why": "", "read_because": "", "took_over": True, **night, "nights": [night]}
    return {REUSE_FACT: fact | changes}


def test_a_night_is_reported_with_the_mean_of_those_before_it() -> None:
    first = {"users": dict.fromkeys(USERS, 0) | {"computed": 100}, "spared_s": 0.0}
    reuse = Reuse.of(make_facts(nights=[first, {"users": USERS, "spared_s": 4.5}]))

    assert reuse is not None and reuse.night.copied_share == 0.9
    reuse_json = reuse.to_json()
    assert (reuse_json["share"], reuse_json["spared_s"], reuse_json["base"]) == (0.9, 4.5, "g")
    assert reuse_json["lately"] == {
        "nights": 2, "users": USERS | {"computed": 100}, "share": 0.45, "spared_s": 2.25,
    }  # fmt: skip


def test_both_reasons_are_reported_as_the_night_wrote_them() -> None:
    reuse = Reuse.of(make_facts(why="another bundle", read_because="files vanished", base=None))

    assert reuse is not None
    assert (reuse.lists_not_copied_because, reuse.sources_read_because, reuse.base_generation) == (
        "another bundle",
        "files vanished",
        None,
    )
    reuse_json = reuse.to_json()
    assert (reuse_json["why"], reuse_json["read_because"]) == ("another bundle", "files vanished")


def test_of_more_nights_than_are_reported_the_last_ones_count() -> None:
    nights = [{"users": USERS, "spared_s": float(number)} for number in range(REUSE_NIGHTS_MAX + 3)]
    reuse = Reuse.of(make_facts(nights=nights))

    assert reuse is not None and len(reuse.nights) == REUSE_NIGHTS_MAX
    assert reuse.recent_total.spared_s == 3 + (REUSE_NIGHTS_MAX - 1) / 2


def test_who_has_no_users_has_no_share() -> None:
    reuse = Reuse.of(make_facts(users={}, nights=[]))

    assert reuse is not None and reuse.night.copied_share is None
    assert reuse.night.user_count_by_reason == dict.fromkeys(REUSE_REASONS, 0)
    assert reuse.to_json()["lately"]["spared_s"] == 0.0


@pytest.mark.parametrize(
    "facts",
    [
        {}, {REUSE_FACT: None}, {REUSE_FACT: {}}, make_facts(users=3), make_facts(users={"copied": "many"}),
        make_facts(nights=[1]), make_facts(spared_s=None), make_facts(nights=None),
    ],
)  # fmt: skip
def test_what_another_version_says_is_nothing(facts: dict[str, Any]) -> None:
    assert Reuse.of(facts) is None
