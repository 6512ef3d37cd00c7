"""Numbers that stand for records under way."""

from cache.tiers.reads import FlightKeys
from tests.fakes import GENERATION, Night


def test_no_two_records_share_a_flight() -> None:
    night, keys = Night(), FlightKeys()
    record_keys = [night.record_key(entity_id) for entity_id in night.ids[:3]]
    record_keys += [record_keys[0]._replace(hash_or_digest=b"0" * 16)]
    flight_keys = [
        keys.of(generation, record_key) for generation in (GENERATION, "other") for record_key in record_keys
    ]
    assert len(set(flight_keys)) == 8 and flight_keys == [
        keys.of(generation, record_key) for generation in (GENERATION, "other") for record_key in record_keys
    ]
    assert keys.table_offset(GENERATION, "a") + 2**64 - 1 < keys.table_offset(GENERATION, "b")
