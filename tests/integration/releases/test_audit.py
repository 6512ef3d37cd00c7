"""Whoever publishes, rolls back, overrides, blocks or erases stands in the audit log, also where it came to nothing."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.errors import ConfigError, Conflict, LarderError
from cache.store.audit import ACTIONS, AuditRecord, audit_records, entity_digest
from precompute.cli.commands import _audit_table
from precompute.cli.override import override
from precompute.cli.parser import build_command_parser
from precompute.config.progress import quiet
from precompute.config.settings import NightConfig
from precompute.releases.recovery import roll_back
from precompute.steps import publish as publish_step
from tests.integration.nights import DATA_UNTIL, NEXT, build_verified, histories, prepare, publish


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> NightConfig:
    config = prepare(tmp_path_factory.mktemp("audit") / "n", redis_url, users=80, items=50)
    return replace(config, actor="ana", warm_timeout_s=0.3)


def run(config: NightConfig, *line: str) -> object:
    """A command of the shell, as `main` runs it."""
    arguments = build_command_parser().parse_args(line)
    return arguments.run.import_command()(config, arguments, quiet)


def latest_audit_records(config: NightConfig, count: int = 1) -> list[AuditRecord]:
    return audit_records(config.store())[-count:]


def summarize_audit_record(record: AuditRecord) -> tuple[str, str, str, str, str]:
    return record.actor, record.action, record.subject, record.reason, record.outcome


def test_every_action_is_written_down_done_or_failed(night: NightConfig) -> None:
    first, store = build_verified(night, DATA_UNTIL), night.store()
    publish(night, first)
    assert summarize_audit_record(latest_audit_records(night)[0]) == ("ana", "publish", first, "", "done")
    assert latest_audit_records(night)[0].found == {"changed": True} and latest_audit_records(night)[0].attempt
    publish(night, first)  # again: written down as well, and that it changed nothing
    assert latest_audit_records(night)[0].found == {"changed": False}
    unknown = f"20260101T000000Z-{'0' * 12}"
    with pytest.raises(LarderError):
        publish_step.run(night, {"generation": unknown}, attempt="a")
    second = build_verified(night, NEXT)
    publish(night, second)

    with pytest.raises(ConfigError):
        roll_back(night, target_generation=None, reason=" ", attempt="a")
    with pytest.raises(LarderError):
        roll_back(night, target_generation=unknown, reason="a typo", attempt="b")
    failed = latest_audit_records(night)[0]
    assert summarize_audit_record(failed) == ("ana", "roll_back", f"to {unknown}", "a typo", "failed")
    assert failed.error and failed.attempt == "b"
    roll_back(night, target_generation=None, reason="second is bad", attempt="c")
    roll_back_record = latest_audit_records(night)[0]
    assert summarize_audit_record(roll_back_record) == (
        "ana",
        "roll_back",
        "to the previous one",
        "second is bad",
        "done",
    )
    assert roll_back_record.found["generation"] == first
    subjects = list(_audit_table([roll_back_record]).columns[4].cells)
    assert subjects == [f"to the previous one: {first}"]

    with pytest.raises(Conflict):
        override(night, second, rule="score_psi", reason="agreed", attempt="d")
    subject = f"{second}, rule score_psi"
    assert summarize_audit_record(latest_audit_records(night)[0]) == ("ana", "override", subject, "agreed", "failed")

    user, item = min(histories(night)), "i-blocked"
    run(night, "block", "--item", item, "--entity", user, "--reason", "a complaint")
    subject = f"items {item}; entities {entity_digest(user.encode())}"
    assert summarize_audit_record(latest_audit_records(night)[0]) == ("ana", "block", subject, "a complaint", "done")
    run(night, "unblock", "--item", item)
    assert summarize_audit_record(latest_audit_records(night)[0])[1:3] == ("unblock", f"items {item}")

    run(night, "erase", user, "--reason", "asked for it")
    subject = f"user {entity_digest(user.encode())}"
    assert summarize_audit_record(latest_audit_records(night)[0]) == ("ana", "erase", subject, "asked for it", "done")
    assert latest_audit_records(night)[0].found == {"number": 1}
    run(night, "erase", user, "--forget", "--reason", "a mistake")
    assert summarize_audit_record(latest_audit_records(night)[0]) == ("ana", "forget", subject, "a mistake", "done")
    with contextlib.suppress(LarderError):
        run(night, "erase", "--gone", "no-such-host")
    assert summarize_audit_record(latest_audit_records(night)[0])[1:3] == ("declare_gone", "host no-such-host")
    with pytest.raises(Conflict):
        run(night, "erase", "nobody", "--forget", "--reason", "never was")
    assert latest_audit_records(night)[0].outcome == "failed"

    records = audit_records(store)
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert {record.action for record in records} == set(ACTIONS) - {
        "adopt", "token_add", "token_revoke", "experiment", "canary_abandon",
    }  # fmt: skip
    folder = store.local_folder
    assert folder is not None
    audit_text = "".join(path.read_text() for path in (folder / "audit").iterdir())
    assert f'"{user}"' not in audit_text and f" {user}" not in audit_text


def test_the_command_shows_all_or_some(night: NightConfig) -> None:
    run(night, "block", "--entity", "u-shown", "--reason", "to be shown")
    output = run(night, "audit", "--json")
    records = orjson.loads(output.content)  # type: ignore[attr-defined]
    assert records[-1]["reason"] == "to be shown" and records[-1]["outcome"] == "done"

    about = orjson.loads(run(night, "audit", "--json", "--entity", "u-shown").content)  # type: ignore[attr-defined]
    assert [record["action"] for record in about] == ["block"]
    no_match = f"none of the {len(records)} audit records in {night.store().url} matches"
    assert run(night, "audit", "--since", "2999-01-01") == [no_match]
    assert orjson.loads(run(night, "audit", "--json", "--since", "2020-01-01T00:00:00Z").content) == records  # type: ignore[attr-defined]  # fmt: skip
    with pytest.raises(ConfigError, match="ISO 8601"):
        run(night, "audit", "--since", "yesterday")
    table: Any = run(night, "audit")
    assert table[0].row_count == len(records)


def test_a_store_without_audit_records_is_named(night: NightConfig, tmp_path: Path) -> None:
    config = replace(night, artifacts=str(tmp_path / "not-mounted"))
    remark = f"{config.store().url} has no audit record; if there should be some, is the store mounted there?"
    assert run(config, "audit") == [remark]


def test_nothing_is_done_that_the_store_does_not_take(
    night: NightConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "audit-is-a-file").mkdir()
    config = replace(night, artifacts=str(tmp_path / "audit-is-a-file"))
    folder = config.store().local_folder
    assert folder is not None
    folder.mkdir(parents=True)
    (folder / "audit").write_text("in the way")

    with pytest.raises(LarderError):
        run(config, "block", "--item", "i-1")

    assert not (folder / "blocklist").exists()
