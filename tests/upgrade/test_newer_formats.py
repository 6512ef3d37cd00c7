"""A format that one side does not read: refused in one line before anything moves, by whichever side can know."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.formats import FORMATS
from cache.store.artefacts import generation_path
from tests.upgrade.conftest import BOTH, Releases
from tests.upgrade.shop import CUTS, Shop, until

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("shop", ["old"], indirect=True)]

SERVED = [stored_format.name for stored_format in FORMATS.values() if stored_format.is_read_by_service]
UNREAD = 1 + max(stored_format.newest_readable_version for stored_format in FORMATS.values())
"""A version that neither release reads."""


@contextlib.contextmanager
def planted(path: Path, content: bytes) -> Iterator[None]:
    """The file with this content, as it was before afterwards."""
    original_content = path.read_bytes() if path.exists() else None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    try:
        yield
    finally:
        if original_content is None:
            path.unlink()
        else:
            path.write_bytes(original_content)


def newer(raw: bytes, **more: object) -> bytes:
    """A document as a newer release would write it."""
    return orjson.dumps({**orjson.loads(raw), "format": UNREAD, **more})


@pytest.mark.parametrize("name", SERVED)
def test_a_night_with_a_newer_format_begins_nothing_while_an_older_replica_beats(
    shop: Shop, releases: Releases, name: str
) -> None:
    refusal = shop.refusal(releases["new"], "night", "--data-until", CUTS[4], newer_format=f"{name}={UNREAD}")

    assert (
        f"reads {name} format " in refusal and f"writes {UNREAD}" in refusal and "upgrade the services first" in refusal
    )
    assert "refused" in refusal


def test_a_move_to_a_generation_of_a_newer_manifest_is_refused(shop: Shop, releases: Releases) -> None:
    previous = shop.previous()
    path = shop.file(generation_path(previous, "manifest.json"))

    with planted(path, newer(path.read_bytes())):
        refusal = shop.refusal(releases["new"], "roll-back", "--reason", "a test", newer_format=f"manifest={UNREAD}")

    assert "reads manifest format " in refusal and f"{previous} has {UNREAD}" in refusal


@pytest.mark.parametrize("release_name", BOTH)
def test_a_newer_pointer_is_followed_by_none_and_replaced_by_none(
    shop: Shop, releases: Releases, release_name: str
) -> None:
    live = shop.live()
    with shop.redis() as client:
        raw: Any = client.get(shop.keys.live)
        client.set(shop.keys.live, newer(raw, epoch=orjson.loads(raw)["epoch"] + 1))
        try:
            assert until(lambda: all(shop.ready(n)["stale"] == "pointer_corrupt" for n in BOTH))
            for name in BOTH:
                assert shop.ready(name)["ready"] and shop.ready(name)["generation"] == live
            refusal = shop.refusal(releases[release_name], "night", "--data-until", CUTS[4])
        finally:
            client.set(shop.keys.live, raw)
    shop.follow(live)

    assert shop.keys.live in refusal
    if release_name == "new":
        assert f"pointer format {UNREAD}" in refusal and "upgrade this program first" in refusal
        assert f"pointer format {UNREAD}" in shop.log("new")


@pytest.mark.parametrize("release_name", BOTH)
def test_a_newer_release_record_stops_the_night_and_no_service(
    shop: Shop, releases: Releases, release_name: str
) -> None:
    number = shop.history()[-1].number
    raw = shop.file(f"releases/{number}.json").read_bytes()
    record = newer(raw, number=number + 1, epoch=orjson.loads(raw)["epoch"] + 1, action="pin")

    with planted(shop.file(f"releases/{number + 1}.json"), record):
        refusal = shop.refusal(releases[release_name], "night", "--data-until", CUTS[4])
        for name in BOTH:
            assert shop.ready(name)["ready"]

    assert f"releases/{number + 1}.json" in refusal
    if release_name == "new":
        assert f"release record format {UNREAD}" in refusal and "upgrade this program first" in refusal


@pytest.mark.parametrize("release_name", BOTH)
def test_a_newer_staging_note_is_heeded_by_no_service(shop: Shop, releases: Releases, release_name: str) -> None:
    live, previous = shop.live(), shop.previous()
    note = {"generation": CUTS[4], "attempt": "a", "until": 2**40, "format": UNREAD}
    with shop.redis() as client:
        client.set(shop.keys.staging_note, orjson.dumps(note))
        try:
            assert until(lambda: "staging note cannot be read" in shop.log(release_name))
            assert shop.ready(release_name)["ready"] and shop.view(release_name)["next"] is None
        finally:
            client.delete(shop.keys.staging_note)

    assert shop.live() == live != previous


def test_a_newer_blocklist_leaves_the_last_one_in_force(shop: Shop, releases: Releases) -> None:
    """Release 0.1.0 looks at no version: a newer format has to lack a field that it demands, here `items`."""
    shop.tell(releases["new"], "block", "--item", shop.items(1)[0])
    version = max(int(file_name[:12]) for file_name in shop.store.names("blocklist"))
    body = orjson.dumps({"format": UNREAD, "version": version + 1, "blocked": []})
    try:
        with planted(shop.file(f"blocklist/{version + 1:012d}.json"), body):
            assert until(lambda: all(shop.ready(n)["stale"] == "blocklist_unreadable" for n in BOTH))
            for name in BOTH:
                assert shop.ready(name)["ready"]
                assert shop.view(name)["blocklist"]["version"] == version
            assert f"blocklist format {UNREAD}" in shop.log("new")
            for release in releases.values():
                refusal = shop.refusal(release, "block", "--item", shop.items(2)[1])
                assert "blocklist" in refusal
    finally:
        shop.tell(releases["new"], "unblock", "--item", shop.items(1)[0])
    shop.follow(shop.live())


@pytest.mark.parametrize("release_name", BOTH)
def test_a_newer_erasure_stops_the_night(shop: Shop, releases: Releases, release_name: str) -> None:
    number = 1 + max([int(file_name[:12]) for file_name in shop.store.names("erasures")], default=0)
    body = orjson.dumps({"number": number, "entity": "x", "kind": "user", "at": 1.0, "was_blocked": False, "format": 2})

    with planted(shop.file(f"erasures/{number:012d}.json"), body):
        refusal = shop.refusal(releases[release_name], "night", "--data-until", CUTS[4])

    assert f"erasures/{number:012d}.json" in refusal


@pytest.mark.parametrize("release_name", BOTH)
def test_a_newer_bundle_stops_the_night(shop: Shop, releases: Releases, release_name: str) -> None:
    path = shop.folder / "bundle/bundle.json"

    with planted(path, newer(path.read_bytes())):
        refusal = shop.refusal(releases[release_name], "night", "--data-until", CUTS[4])

    assert "bundle.json has" in refusal and f"format {UNREAD}" in refusal


def test_a_newer_registry_row_stops_the_new_release_and_is_passed_over_by_the_first(
    shop: Shop, releases: Releases
) -> None:
    """Release 0.1.0 reads the fields that it knows: no version may change the meaning of one of these."""
    live = shop.live()
    with shop.redis() as client:
        row: Any = client.hget(shop.keys.generations, live)
        client.hset(shop.keys.generations, live, newer(row))
        try:
            refusal = shop.refusal(releases["new"], "night", "--data-until", CUTS[4])
            if not (releases["old"].root / "cache/formats.py").exists():
                shop.tell(releases["old"], "retire")
        finally:
            client.hset(shop.keys.generations, live, row)

    assert f"registry row format {UNREAD}" in refusal and live in refusal
