"""Numbers that stand for records under way."""

from cache.tiers.addressing import FlightKeys
from tests.fakes import GENERATION, Night


def test_no_two_records_share_a_flight() -> None:
    night, keys = Night(), FlightKeys()
    wants = [night.want(each) for each in night.ids[:3]]
    wants += [wants[0]._replace(key=b"0" * 16)]
    found = [keys.of(generation, each) for generation in (GENERATION, "other") for each in wants]
    assert len(set(found)) == 8 and found == [
        keys.of(generation, each) for generation in (GENERATION, "other") for each in wants
    ]
    assert keys.start(GENERATION, "a") + 2**64 - 1 < keys.start(GENERATION, "b")
