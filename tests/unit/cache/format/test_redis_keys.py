"""Redis keys: which share a slot, and how wide they are."""

import numpy as np

from cache.format.redis_keys import Keyspace, hash_hex


def test_control_keys_share_a_slot_and_pages_do_not():
    keys = Keyspace("shop")
    assert all("{shop}" in key for key in (keys.live, keys.generations, keys.replicas, keys.hot_names(1)))
    assert "{" not in keys.page("g", "t", 0) + keys.overlay("g", "t", "0") + keys.loaded_parts("g")


def test_overlay_keys_have_a_fixed_width():
    assert hash_hex(1) == "0000000000000001"
    assert hash_hex(b"\x00" * 16) == "0" * 32
    assert np.uint64(0xFFFFFFFFFFFFFFFF) == int(hash_hex(2**64 - 1), 16)
