"""Stored bytes. A change here is a change of format: it needs a new format number and a line in the changelog."""

import numpy as np

from cache.format.ids import FINGERPRINT_SEED, fingerprint, hash_id, input_digest
from cache.format.manifest import (
    MANIFEST_FORMAT,
    Artefact,
    DirectoryPart,
    EntitySet,
    Index,
    ItemFiles,
    Manifest,
    Model,
    Producer,
    Table,
    TablePart,
)
from cache.format.redis_keys import KEYSPACE_VERSION, Keyspace, hash_hex
from cache.records import FLAG_LIVE, RECORD_FORMAT, Layout, encode_numbers, encode_topk, pack_overlay
from cache.store.releases import Pointer, Release

FINGERPRINTS = np.array([0x1122334455667788], np.uint64)
GENERATION = "20260131T000000Z-0123456789ab"


def test_the_formats_are_1():
    assert (RECORD_FORMAT, MANIFEST_FORMAT, KEYSPACE_VERSION) == (1, 1, 1)


def test_ids_hash_to_these_numbers():
    assert hash_id(b"u-00042", 0) == 0x40F1B793D48F0A18
    assert hash_id(b"u-00042", 1) == 0x2ECE5187B9ED43BE
    assert fingerprint(b"u-00042") == hash_id(b"u-00042", FINGERPRINT_SEED) == 0x0BE399F29657CE74


def test_inputs_digest_to_these_bytes():
    digest = input_digest("model", [b"a", b"b"], {"age": 7, "x": (1.0, -0.0), "s": "t", "f": 0.5, "b": True})
    assert digest.hex() == "1334def18fdcf52a3e36a04eecd5e6dc"


def test_keys_read_like_this():
    keys = Keyspace("shop")
    assert keys.live == "larder:1:{shop}:live"
    assert keys.generations == "larder:1:{shop}:generations"
    assert keys.replicas == "larder:1:{shop}:replicas"
    assert keys.page(GENERATION, "user_topk", 3) == f"larder:1:shop:g:{GENERATION}:user_topk:3"
    assert keys.overlay(GENERATION, "user_topk", hash_hex(255)) == (
        f"larder:1:shop:w:{GENERATION}:user_topk:00000000000000ff"
    )


def test_a_top_k_record():
    record = encode_topk(
        Layout("topk", 3, "f2"),
        FINGERPRINTS,
        np.array([[7, 9]], np.uint32),
        np.array([[2.0, 1.0]], np.float32),
        0x01020304,
    )[0].tobytes()
    assert record.hex() == ("887766554433221104030201020010f30700000009000000ffffffff007400700000")


def test_an_int8_vector_record_written_live():
    record = encode_numbers(
        Layout("vector", 3, "i1"), FINGERPRINTS, np.array([[127.0, -63.5, 0.0]], np.float32), 1, flags=FLAG_LIVE
    )[0].tobytes()
    assert record.hex() == "887766554433221101000000030011000000803f7fc000"


def test_a_value_record_and_its_overlay():
    record = encode_numbers(Layout("value", 2, "f4"), FINGERPRINTS, np.array([[1.0, 0.25]], np.float32), 1)[0].tobytes()
    assert record.hex() == "887766554433221101000000020010000000803f0000803e"
    assert pack_overlay(record, b"\x01" * 16) == record + b"\x01" * 16


def test_a_pointer_and_a_release():
    pointer = Pointer(GENERATION, 5, None, "run-1", 1.5)
    assert pointer.to_bytes() == (
        b'{"generation":"%s","epoch":5,"previous":null,"attempt":"run-1","published_at":1.5,"canary":null}'
        % GENERATION.encode()
    )
    release = Release(5, "publish", GENERATION, None, "run-1", 1.5, is_done=True)
    assert Release.from_bytes(release.to_bytes(), is_done=True) == release
    assert b'"done"' not in release.to_bytes()


def test_a_manifest_survives_the_round_trip_to_the_byte():
    file = Artefact("a/b", 8, "00" * 32)
    manifest = Manifest(
        namespace="shop",
        generation=GENERATION,
        data_until=1,
        created_at=2,
        bundle_digest="b",
        inputs_digest="i",
        entity_sets={"user": EntitySet("user", 1, 1, (DirectoryPart(2**63, 1, file),))},
        items=ItemFiles(file, file, file, file, 1, 2),
        tables={
            "t": Table(
                "t",
                "user",
                Producer("value", "m"),
                Layout("value", 2, "f4"),
                4,
                (TablePart(0, 1, 1, file, file),),
                ("x", "y"),
            )
        },
        models={"m": Model("m", file, None, "d", {"inputs": []}, {"overlap_at_20": 1.0})},
        indexes={"cosine": Index("cosine", "flat", file, 0.5)},
        defaults=file,
        gates=({"rule": "r", "passed": True},),
        timings={"score": 1.5},
        facts={"users": 1},
    )
    parsed_manifest = Manifest.from_bytes(manifest.to_bytes())
    assert parsed_manifest == manifest
    assert parsed_manifest.to_bytes() == manifest.to_bytes()
