"""URLs of a Redis Cluster, slots of keys, and what nodes say of who serves them."""

from binascii import crc_hqx

import pytest
from redis.crc import key_slot

from cache.errors import ConfigError
from cache.format.redis_keys import Keyspace
from cache.l2.slots import SLOT_COUNT, PageSlots, address_of, is_cluster, node_url, owners_from_reply, seed_urls

KEYS = Keyspace("default")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+cluster://a:7000", ["redis://a:7000"]),
        ("redis+cluster://a", ["redis://a"]),
        (
            "rediss+cluster://u:p%40ss@a:1,[::1]:2/0?ssl_cert_reqs=none",
            ["rediss://u:p%40ss@a:1/0?ssl_cert_reqs=none", "rediss://u:p%40ss@[::1]:2/0?ssl_cert_reqs=none"],
        ),
    ],
)
def test_a_url_names_its_seeds(url: str, expected: list[str]) -> None:
    assert is_cluster(url) and not is_cluster(expected[0])
    assert seed_urls(url) == expected


@pytest.mark.parametrize(
    "url", ["redis+cluster://u:secret@", "redis+cluster://u:secret@a:x", "redis+cluster://u:secret@a:1,"]
)
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="host:port") as caught:
        seed_urls(url)
    assert "secret" not in str(caught.value)


def test_a_cluster_has_one_database() -> None:
    with pytest.raises(ConfigError, match="database 0"):
        seed_urls("redis+cluster://a:1/3")


@pytest.mark.parametrize(("url", "address"), [("redis://a", "a:6379"), ("redis://u:p@[::1]:7", "[::1]:7")])
def test_an_address_and_back(url: str, address: str) -> None:
    assert address_of(url) == address
    assert address_of(node_url("rediss://u:p@seed:1?x=y", address)) == address
    assert node_url("rediss://u:p@seed:1?x=y", address) == f"rediss://u:p@{address}?x=y"


def test_the_slot_of_a_page_is_that_of_its_key() -> None:
    slots = PageSlots(KEYS, "g1", "user_topk")
    for page in (0, 9, 10, 12_345):
        name = KEYS.page("g1", "user_topk", page).encode()
        assert slots[page] == crc_hqx(name, 0) % SLOT_COUNT == key_slot(name)


def test_control_keys_share_a_slot_and_pages_and_overlays_spread() -> None:
    control = (KEYS.live, KEYS.staging_note, KEYS.generations, KEYS.replicas)
    assert {key_slot(key.encode()) for key in control} == {crc_hqx(b"default", 0) % SLOT_COUNT}
    overlays = {key_slot(KEYS.overlay("g1", "user_topk", f"{n:016x}").encode()) for n in range(500)}
    assert len(overlays) > 480


def test_a_reply_becomes_a_map_whatever_form_the_hosts_have() -> None:
    reply = [
        [0, 1, [b"10.0.0.1", 7000, b"id", []], [b"10.0.0.9", 7009, b"id", []]],
        [2, 2, [b"", 7001, b"id", []]],
        [3, 3, [None, 7002, b"id", []]],
        [4, 4, ["?", 7003, "id"]],
        [5, 5, [b"fe80::1", 7004, b"id", []]],
    ]
    assert owners_from_reply(reply, "10.0.0.5:7001") == {
        0: "10.0.0.1:7000", 1: "10.0.0.1:7000", 2: "10.0.0.5:7001", 3: "10.0.0.5:7002",
        4: "10.0.0.5:7003", 5: "[fe80::1]:7004",
    }  # fmt: skip
