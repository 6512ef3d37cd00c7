"""A tokens file is read strictly, and an error says where it is wrong without repeating a secret."""

import os
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from cache.errors import ConfigError
from serving.access.token_file import (
    TOKEN_FILE_BYTES_MAX,
    TOKENS_MAX,
    TokenEntry,
    lock_tokens,
    read_tokens,
    write_tokens,
)

DIGEST = "ab" * 32
SECRET = "larder_" + "S" * 43


def written(path: Path, tokens: Any, **changes: Any) -> Path:
    """A file with these entries, whatever they are."""
    path.write_bytes(orjson.dumps({"version": 1, "tokens": tokens, **changes}))
    return path


def test_what_is_written_is_read_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tokens.json"
    tokens = {
        "ana": TokenEntry(sha256=DIGEST, scopes=("read", "events"), requests_per_s=5, in_flight=2),
        "ben": TokenEntry(sha256="cd" * 32, scopes=("admin",), expires_at="2030-01-01T00:00:00+01:00"),
    }  # fmt: skip

    write_tokens(path, tokens)

    assert read_tokens(path) == tokens
    assert path.stat().st_mode & 0o777 == 0o600 and [file.name for file in path.parent.iterdir()] == ["tokens.json"]
    assert tokens["ben"].expires_at_s == 1_893_452_400.0


def test_a_changed_file_keeps_its_mode(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens.json", {})
    path.chmod(0o640)

    write_tokens(path, {"ana": TokenEntry(sha256=DIGEST, scopes=("read",))})

    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_changed_file_keeps_its_owner_and_group(tmp_path: Path) -> None:
    path = written(tmp_path / "tokens.json", {})
    os.chown(path, 65_534, 65_533)

    write_tokens(path, {"ana": TokenEntry(sha256=DIGEST, scopes=("read",))})

    assert (path.stat().st_uid, path.stat().st_gid) == (65_534, 65_533)
    assert list(read_tokens(path)) == ["ana"]


def test_a_file_of_another_user_is_left_as_it_was_if_it_cannot_be_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "tokens.json", {})
    owner = path.stat()
    real_stat = Path.stat

    def stat_of_another(self: Path, **options: bool) -> os.stat_result:
        status = real_stat(self, **options)
        if self != path:
            return status
        return os.stat_result((*status[:4], owner.st_uid + 1, *status[5:10]))

    def refuse(*_arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "stat", stat_of_another)
    monkeypatch.setattr(os, "chown", refuse)

    with pytest.raises(ConfigError, match=f"belongs to uid {owner.st_uid + 1} .* as root"):
        write_tokens(path, {"ana": TokenEntry(sha256=DIGEST, scopes=("read",))})

    assert read_tokens(path) == {}
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.json"]


@pytest.mark.parametrize(("entry", "expected"), [
    ({"sha256": DIGEST, "scopes": ["write"]}, "scopes must be among read, score, .*, not 'write'"),
    ({"sha256": DIGEST, "scopes": []}, "scopes must name at least one"),
    ({"sha256": DIGEST, "scopes": "read"}, "scopes must be"),
    ({"sha256": DIGEST}, "scopes is missing"),
    ({"sha256": DIGEST, "scopes": ["read"], "scope": 1}, "unknown setting 'scope'; did you mean scopes?"),
    ({"sha256": DIGEST, "scopes": ["read"], "requests_per_s": 0}, "requests_per_s must be above 0, not 0"),
    ({"sha256": DIGEST, "scopes": ["read"], "requests_per_s": "5"}, "requests_per_s must be a finite number, not '5'"),
    ({"sha256": DIGEST, "scopes": ["read"], "in_flight": 1.5}, "in_flight must be a whole number, not 1.5"),
    ({"sha256": DIGEST, "scopes": ["read"], "expires_at": "tomorrow"}, "expires_at must be a time like .*'tomorrow'"),
    ({"sha256": DIGEST, "scopes": ["read"], "expires_at": "2030-01-01T00:00:00"}, "with its offset from UTC"),
    ({"sha256": DIGEST.upper(), "scopes": ["read"]}, "sha256 must be 64 hex digits"),
    ({"sha256": SECRET, "scopes": ["read"]}, "sha256 must be 64 hex digits"),
    (["read"], "must be an object of settings"),
])  # fmt: skip
def test_a_wrong_entry_is_refused_with_file_name_field_and_what_is_allowed(
    tmp_path: Path, entry: Any, expected: str
) -> None:
    path = written(tmp_path / "tokens.json", {"ana": entry})

    with pytest.raises(ConfigError, match=expected) as refused:
        read_tokens(path)

    assert str(path) in refused.value.message and "'ana'" in refused.value.message
    assert SECRET not in refused.value.message


@pytest.mark.parametrize("name", ["", "default", "-a", "a b", "ä", "a" * 65, "a/b"])
def test_names_are_fit_for_labels(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "tokens.json", {name: {"sha256": DIGEST, "scopes": ["read"]}})

    with pytest.raises(ConfigError, match="name"):
        read_tokens(path)


@pytest.mark.parametrize(("body", "expected"), [
    (b"", "is not JSON"), (b"[]", "must be an object"), (b'{"version":1}', "must be an object"),
    (b'{"version":2,"tokens":{}}', "version must be 1, not 2"), (b'{"version":1,"tokens":[]}', "at most 256"),
    (b" " * (TOKEN_FILE_BYTES_MAX + 1), "larger than"), (b"\xff", "is not JSON"), (b"[" * 100_000, "is not JSON"),
])  # fmt: skip
def test_what_is_no_tokens_file_is_refused(tmp_path: Path, body: bytes, expected: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(body)

    with pytest.raises(ConfigError, match=expected):
        read_tokens(path)


def test_a_file_that_is_missing_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*tokens add"):
        read_tokens(tmp_path / "none.json")


def test_two_names_for_one_token_and_too_many_are_refused(tmp_path: Path) -> None:
    entry_json = {"sha256": DIGEST, "scopes": ["read"]}
    with pytest.raises(ConfigError, match="ana and ben have the same"):
        read_tokens(written(tmp_path / "a", {"ana": entry_json, "ben": entry_json}))
    excess_entries = {
        f"t{number}": {"sha256": f"{number:064x}", "scopes": ["read"]} for number in range(TOKENS_MAX + 1)
    }
    with pytest.raises(ConfigError, match="at most 256"):
        read_tokens(written(tmp_path / "b", excess_entries))
    with pytest.raises(ConfigError, match="at most 256"):
        write_tokens(tmp_path / "c", {name: TokenEntry(sha256=DIGEST, scopes=("read",)) for name in excess_entries})


def test_changes_of_one_file_wait_for_one_another(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write_tokens(path, {})

    def add(number: int) -> None:
        with lock_tokens(path):
            tokens = dict(read_tokens(path))
            entry = TokenEntry(sha256=f"{number:064x}", scopes=("read",))
            write_tokens(path, tokens | {f"t{number}": entry})

    threads = [threading.Thread(target=add, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(read_tokens(path)) == 20
