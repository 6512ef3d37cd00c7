"""A changed tokens file is in force at the next look, one that is wrong never is."""

import hashlib
import logging
from pathlib import Path
from typing import NoReturn

import pytest

from cache.errors import ConfigError
from serving.access import callers
from serving.access.callers import Callers, TokenWatch
from serving.access.quota import QuotaTable
from serving.access.token_file import TokenEntry, write_tokens


def entry(token: str, *scopes: str) -> TokenEntry:
    return TokenEntry(sha256=hashlib.sha256(token.encode()).hexdigest(), scopes=scopes or ("read",))


def watch(path: Path, token: str = "") -> TokenWatch:
    return TokenWatch(token, str(path), QuotaTable.create_private())


def name_of(known_callers: Callers, token: str) -> str:
    return known_callers.identify([(b"authorization", f"Bearer {token}".encode())]).name


def samples(watched: TokenWatch) -> dict[tuple[str, ...], float]:
    """Samples by name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in watched.collect()
        for sample in family.samples
    }


def test_a_change_is_in_force_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write_tokens(path, {"ana": entry("a")})
    token_watch = watch(path, token="sesame")
    initial_callers = token_watch.callers
    assert not token_watch.reload_if_changed() and token_watch.callers is initial_callers

    write_tokens(path, {"ben": entry("b")})

    assert token_watch.reload_if_changed() and token_watch.callers is not initial_callers
    assert [name_of(token_watch.callers, token) for token in ("a", "b", "sesame")] == ["", "ben", "default"]
    assert not token_watch.reload_if_changed()


@pytest.mark.parametrize("body", [b"{", b'{"version":1,"tokens":{"x":{}}}', None])
def test_a_file_that_became_wrong_changes_nothing_and_says_so_once(
    tmp_path: Path, body: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens.json"
    write_tokens(path, {"ana": entry("a")})
    token_watch = watch(path)
    initial_callers = token_watch.callers

    path.unlink() if body is None else path.write_bytes(body)
    with caplog.at_level(logging.ERROR):
        reload_flags = [token_watch.reload_if_changed() for _ in range(3)]

    assert (
        reload_flags == [False] * 3
        and token_watch.callers is initial_callers
        and name_of(initial_callers, "a") == "ana"
    )
    assert len(caplog.records) == 1 and str(path) in caplog.text
    assert samples(token_watch)["larder_tokens_stale",] == 1
    write_tokens(path, {"ana": entry("a"), "ben": entry("b")})
    assert token_watch.reload_if_changed() and samples(token_watch)["larder_tokens_stale",] == 0


def test_a_file_that_becomes_readable_without_a_change_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a changed file that the service may not read
    path = tmp_path / "tokens.json"
    write_tokens(path, {"ana": entry("a"), "ben": entry("b")})
    token_watch = watch(path)
    write_tokens(path, {"ana": entry("a")})

    def refuse(refused_path: Path) -> NoReturn:
        raise ConfigError(f"cannot read {refused_path}: Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(callers, "read_tokens", refuse)
        assert not token_watch.reload_if_changed() and token_watch.is_stale

    # When it may read the file, whose modification time has not changed
    assert token_watch.reload_if_changed()

    # Then the revoked token is gone
    assert name_of(token_watch.callers, "b") != "ben" and not token_watch.is_stale


def test_counts_outlive_a_change_and_end_with_the_name(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    write_tokens(path, {"ana": entry("a"), "ben": entry("b")})
    token_watch = watch(path)
    token_watch.callers.identify([(b"authorization", b"Bearer a")]).counts.request_count += 3

    write_tokens(path, {"ana": entry("a", "score")})
    token_watch.reload_if_changed()

    value_by_sample = samples(token_watch)
    assert value_by_sample["larder_token_requests_total", "ana"] == 3
    assert not [sample_key for sample_key in value_by_sample if "ben" in sample_key]


def test_a_file_that_is_wrong_at_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokens add"):
        watch(tmp_path / "none.json")


def test_without_a_file_nothing_is_looked_at() -> None:
    token_watch = TokenWatch("sesame", "", QuotaTable.create_private())

    assert not token_watch.reload_if_changed() and name_of(token_watch.callers, "sesame") == "default"
    assert samples(token_watch)["larder_token_requests_total", "default"] == 0
