"""The command makes tokens that are shown once, and every change of theirs is in the audit log."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from cache.store.artefacts import ArtefactStore
from cache.store.audit import audit_records
from serving.__main__ import main
from serving.access.token_file import read_tokens


@pytest.fixture
def settings_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose settings name a tokens file."""
    for name, value in {
        "LARDER_TOKENS_FILE": tmp_path / "tokens.json", "LARDER_ARTIFACTS": tmp_path / "artifacts",
        "LARDER_ACTOR": "ana",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    return tmp_path


def audit(folder: Path) -> list[Any]:
    return audit_records(ArtefactStore(str(folder / "artifacts" / "default")))


def test_a_token_is_shown_once_and_kept_as_its_hash(settings_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "tokens add shop --scope read --scope score --days 30 --requests-per-s 50 --in-flight 4"
    assert main([*line.split(), "--reason", "the shop"]) == 0
    token = capsys.readouterr().out.strip()

    assert token.startswith("larder_") and len(token) == 50
    entry = read_tokens(settings_folder / "tokens.json")["shop"]
    assert entry.sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert (entry.scopes, entry.requests_per_s, entry.in_flight) == (("read", "score"), 50.0, 4)
    assert main(["tokens", "list"]) == main(["tokens", "list", "--json"]) == 0
    token_listing = capsys.readouterr().out
    assert "shop" in token_listing and "read,score" in token_listing and token not in token_listing
    assert entry.sha256 not in token_listing
    for file in settings_folder.rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes()
    (record,) = audit(settings_folder)
    assert (record.action, record.subject, record.actor) == ("token_add", "shop", "ana")
    assert (record.reason, record.outcome) == ("the shop", "done")


def test_a_revoked_token_is_gone_and_failures_are_written_down_too(
    settings_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokens", "add", "shop", "--scope", "read"]) == 0
    assert main(["tokens", "add", "shop", "--scope", "admin"]) == 2
    assert "there is a token 'shop'" in capsys.readouterr().err
    assert main(["tokens", "revoke", "shop", "--reason", "leaked"]) == 0
    assert main(["tokens", "revoke", "shop"]) == 2

    assert read_tokens(settings_folder / "tokens.json") == {}
    assert [(record.action, record.outcome) for record in audit(settings_folder)] == [
        ("token_add", "done"), ("token_add", "failed"), ("token_revoke", "done"), ("token_revoke", "failed"),
    ]  # fmt: skip


@pytest.mark.parametrize("is_file_first", [True, False])
def test_the_file_is_named_before_or_behind_the_command(settings_folder: Path, is_file_first: bool) -> None:
    other_file = settings_folder / "other.json"
    file_option, command = ["--file", str(other_file)], ["add", "shop", "--scope", "read"]

    assert main(["tokens", *(file_option + command if is_file_first else command + file_option)]) == 0
    assert main(["tokens", *([*file_option, "list"] if is_file_first else ["list", *file_option])]) == 0

    assert read_tokens(other_file).keys() == {"shop"} and not (settings_folder / "tokens.json").exists()


def test_what_cannot_be_written_down_is_not_done(
    settings_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (settings_folder / "artifacts").write_text("no folder")

    assert main(["tokens", "add", "shop", "--scope", "read"]) == 2

    assert "larder_" not in capsys.readouterr().out and not (settings_folder / "tokens.json").exists()


@pytest.mark.parametrize(("line", "expected_text"), [
    ("add default --scope read", "LARDER_TOKEN"), ("add a/b --scope read", "letters"),
    ("add a --scope read --days -1", "--days"), ("add a --scope read --requests-per-s 0", "above 0"),
])  # fmt: skip
def test_what_cannot_be_made_is_said_in_a_line(
    settings_folder: Path, capsys: pytest.CaptureFixture[str], line: str, expected_text: str
) -> None:
    assert main(["tokens", *line.split()]) == 2

    error_output = capsys.readouterr().err
    assert expected_text in error_output and error_output.count("\n") == 1 and audit(settings_folder) == []


def test_a_pasted_token_is_not_written_down(settings_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokens", "add", "shop", "--scope", "read"]) == 0
    token = capsys.readouterr().out.strip()

    assert main(["tokens", "revoke", token]) == 2
    assert main(["tokens", "revoke", "shop", "--reason", f"leaked {token} to a chat"]) == 0

    assert token not in json.dumps([str(record) for record in audit(settings_folder)])
