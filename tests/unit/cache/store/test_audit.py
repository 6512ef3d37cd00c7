"""What is done is written down before and after, once, and nothing is done that is not."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cache.errors import Conflict, StoreError
from cache.store.artefacts import ArtefactStore
from cache.store.audit import TEXT_CHARS_MAX, audit_records, audited, describe_blocked_ids, entity_digest, user_and_host
from tests.fakes import FakeClock
from tests.object_stores import Counting, Overwriting, store_of

TOKEN = "larder_" + "k" * 43


@pytest.fixture(params=["folder", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ArtefactStore:
    """A store on disk, and one of objects."""
    if request.param == "folder":
        return ArtefactStore(str(tmp_path / "artifacts"))
    return store_of(Counting, tmp_path)


def test_an_action_is_written_down_before_and_after(store: ArtefactStore) -> None:
    clock = FakeClock(100.0)
    with audited(store, "publish", "g1", actor="ana", reason="a night", attempt="run-1", wall_clock=clock) as findings:
        (open_one,) = audit_records(store)
        assert (open_one.outcome, open_one.ended_at) == ("interrupted", None)
        findings["changed"] = True
        clock.tick(5)

    (record,) = audit_records(store)
    assert (record.number, record.at, record.ended_at) == (1, 100.0, 105.0)
    assert (record.actor, record.action, record.subject) == ("ana", "publish", "g1")
    assert (record.reason, record.attempt, record.outcome) == ("a night", "run-1", "done")
    assert record.found == {"changed": True} and record.error == ""


def test_a_failure_is_kept_with_its_error(store: ArtefactStore) -> None:
    with pytest.raises(Conflict), audited(store, "roll_back", "g1"):
        raise Conflict("another publisher was first")
    with pytest.raises(KeyboardInterrupt), audited(store, "block", "items i-1"):
        raise KeyboardInterrupt

    first, second = audit_records(store)
    assert (first.outcome, first.error) == ("failed", "conflict: another publisher was first")
    assert (second.outcome, second.error) == ("failed", "KeyboardInterrupt: ")
    assert first.actor == user_and_host()


def test_nothing_is_done_that_cannot_be_written_down(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file where the folder was")
    store, performed_actions = ArtefactStore(str(tmp_path / "artifacts")), list[str]()

    with pytest.raises(StoreError), audited(store, "erase", "user 1"):
        performed_actions.append("erased")

    assert performed_actions == []


def test_a_store_that_lets_records_be_overwritten_is_refused(tmp_path: Path) -> None:
    performed_actions: list[str] = []

    with pytest.raises(StoreError), audited(store_of(Overwriting, tmp_path), "block", "items i-1"):
        performed_actions.append("blocked")

    assert performed_actions == []


def test_an_outcome_that_cannot_be_written_leaves_the_record_open(
    store: ArtefactStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_once: Callable[..., bool] = store.write_once

    def refusing(path: str, data: bytes) -> bool:
        if path.endswith(".outcome"):
            raise StoreError("full")
        return write_once(path, data)

    monkeypatch.setattr(store, "write_once", refusing)
    with audited(store, "publish", "g1"):
        pass

    assert audit_records(store)[0].outcome == "interrupted" and "audit log" in caplog.text


def test_numbers_are_given_once_to_concurrent_writers(store: ArtefactStore) -> None:
    def write(number: int) -> None:
        with audited(store, "publish", f"g{number}"):
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(24)))

    records = audit_records(store)
    assert [record.number for record in records] == list(range(1, 25))
    assert {record.subject for record in records} == {f"g{number}" for number in range(24)}


def test_a_listing_that_lags_behind_costs_tries_and_no_record(
    store: ArtefactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        with audited(store, "publish", f"g{number}"):
            pass
    with monkeypatch.context() as lagging:
        lagging.setattr(store, "names", lambda _path: ["000000000001.json"])
        with audited(store, "publish", "g3"):
            pass

    assert [record.subject for record in audit_records(store)] == ["g0", "g1", "g2", "g3"]


def test_a_record_that_was_taken_away_or_changed_is_seen(store: ArtefactStore) -> None:
    for number in range(3):
        with audited(store, "publish", f"g{number}"):
            pass
    store.delete("audit/000000000001.json")
    store.delete("audit/000000000002.json")
    store.write("audit/000000000002.json", b"[]")

    assert [record.outcome for record in audit_records(store)] == ["missing", "unreadable", "done"]


def test_many_records_are_packed_for_who_reads_and_stay_the_truth(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    for number in range(80):
        with audited(store, "publish", f"g{number}"):
            pass

    first, reread_records = audit_records(store), audit_records(store)

    assert first == reread_records and len(first) == 80
    assert any(name.startswith("pack-") for name in store.names("audit"))
    with audited(store, "publish", "one more"):
        pass
    assert audit_records(store)[-1].subject == "one more"


def test_no_secret_is_written_down(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    secrets = [TOKEN, "hunter2", "bearer-words", "AKIA123"]
    with pytest.raises(StoreError), audited(
        store, "token_revoke", f"shop {TOKEN}", actor=f"ana {TOKEN}",
        reason=f"Authorization: Bearer bearer-words; {TOKEN}\nsecond line",
    ):  # fmt: skip
        raise StoreError("cannot reach redis://user:hunter2@host/0, secret_key=AKIA123")

    stored_text = b"".join(path.read_bytes() for path in tmp_path.rglob("*.*") if path.is_file()).decode()
    assert not [secret for secret in secrets if secret in stored_text] and "shop larder_***" in stored_text
    assert "\n" not in audit_records(store)[0].reason


def test_long_texts_are_cut(tmp_path: Path) -> None:
    store = ArtefactStore(str(tmp_path))
    with audited(store, "block", "x" * 10_000, reason="y" * 10_000, actor="z" * 10_000):
        pass

    (record,) = audit_records(store)
    assert max(map(len, (record.subject, record.reason, record.actor))) < TEXT_CHARS_MAX + 20


def test_ids_of_users_stand_there_as_digests() -> None:
    subject_text = describe_blocked_ids([b"i-1", b"i-2"], [b"u-1"])

    assert subject_text == f"items i-1, i-2; entities {entity_digest(b'u-1')}" and "u-1" not in subject_text
    assert describe_blocked_ids([b"%d" % number for number in range(25)], []).endswith("19 and 5 more")
    assert len(entity_digest(b"u-1")) == len("sha256:") + 16
