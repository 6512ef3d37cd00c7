"""Commands against a store that is not that of Redis: each that writes is refused before it writes anything."""

import argparse
import os
from pathlib import Path

import pytest

from cache.format.redis_keys import Keyspace
from cache.l2.sync_clients import connect
from cache.store.blocklist import change_blocklist
from cache.store.releases import Pointer
from infra.cli.check import check_store
from precompute.cli.parser import build_command_parser
from precompute.config.settings import night_config
from precompute.erasure import erasing
from serving.cli import tokens
from tests.integration.shell import shell

G = "20260101T000000Z-000000000001"
READS = {"audit", "freshness", "plan", "status", "worklist"}
WORDS: dict[str, list[str]] = {
    "night": [], "train": [], "begin": [], "take-events": [], "hand-over": ["bundle"], "score": [G], "index": [G],
    "quantize": [G], "load": [G], "verify": [G], "override": [G, "--rule", "skew", "--reason", "r"], "publish": [G],
    "warm": [G], "canary": ["status"], "experiment": ["status"], "roll-back": ["--reason", "r"], "retire": [],
    "restore": [], "pin": [G, "--reason", "r"], "unpin": [G], "block": ["--item", "i"], "unblock": ["--item", "i"],
    "erase": ["57"],
}  # fmt: skip
"""Words behind each command that writes into the store, by its name."""


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in build_command_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.fixture
def environ(tmp_path: Path, keyspace: Keyspace, redis_url: str) -> dict[str, str]:
    """The environment of commands whose Redis has a pointer, and whose store is not there."""
    pointer = Pointer(G, 1_770_000_000_000, None, "a", 0.0)
    with connect(redis_url, 5.0) as client:
        client.set(keyspace.live, pointer.to_bytes())
    return {
        "PATH": os.environ["PATH"], "REDIS_URL": redis_url, "LARDER_NAMESPACE": keyspace.namespace,
        "LARDER_ARTIFACTS": str(tmp_path / "wrong"), "LARDER_STATE": str(tmp_path / "state"),
    }  # fmt: skip


def test_every_command_is_known_to_read_or_to_write() -> None:
    stores = {name: command.get_default("store") for name, command in commands().items()}

    assert {name for name, store in stores.items() if store == "reads"} == READS
    assert stores.keys() == WORDS.keys() | READS


@pytest.mark.parametrize("name", WORDS)
def test_a_command_that_writes_is_refused_and_makes_no_store(
    name: str, environ: dict[str, str], tmp_path: Path
) -> None:
    ended = shell(name, *WORDS[name], environ=environ)

    assert ended.returncode == 1, ended.stdout
    assert "conflict: " in ended.stderr and "that no release record explains" in ended.stderr
    assert "LARDER_ARTIFACTS" in ended.stderr and ended.stdout == ""
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("name", ["block", "erase"])
def test_a_list_of_a_store_that_was_replaced_is_shown(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    config = night_config(environment=environ)
    change_blocklist(config.store(), block_items=[b"banned"])
    erasing.begin_erasing(config.store(), b"gone", "user", requested_at=1.0)

    ended = shell(name, "--list", environ=environ)

    assert ended.returncode == 0 and "conflict" not in ended.stderr
    assert {"block": "banned", "erase": "gone"}[name] in ended.stdout


def test_a_token_is_not_made_then(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    code = tokens.main(["--file", str(tmp_path / "tokens.toml"), "add", "app", "--scope", "read"])

    assert code == 2 and "no release record explains" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists() and not (tmp_path / "tokens.toml").exists()


def test_check_says_so_and_makes_no_store(environ: dict[str, str], tmp_path: Path) -> None:
    config = night_config(None, environ)

    state, told = check_store(config)

    assert state == "to do" and "no release record explains" in told
    assert not (tmp_path / "wrong").exists()


def test_an_erasure_is_not_done_in_a_store_without_generations(
    environ: dict[str, str], tmp_path: Path, keyspace: Keyspace, redis_url: str
) -> None:
    with connect(redis_url, 5.0) as client:
        client.delete(keyspace.live)

    erased = shell("erase", "57", environ=environ)

    assert erased.returncode == 0, erased.stderr
    assert "is empty or new" in erased.stderr
    assert "1 pending" in erased.stdout and "there is no generation in" in erased.stdout


def test_a_user_without_rights_in_the_namespace_is_told_which_one_it_is(
    environ: dict[str, str], tmp_path: Path, redis_url: str
) -> None:
    with connect(redis_url, 5.0) as client:
        client.acl_setuser(
            "loader-of-one", enabled=True, passwords=["+pw"], keys=["larder:1:{one}:*"], commands=["+@all"]
        )
    try:
        url = redis_url.replace("redis://", "redis://loader-of-one:pw@")
        environ |= {"REDIS_URL": url, "LARDER_NAMESPACE": "other"}
        ended = shell("block", "--item", "i", environ=environ)
    finally:
        with connect(redis_url, 5.0) as client:
            client.acl_deluser("loader-of-one")

    assert ended.returncode == 1
    assert "its rights are not for namespace `other`; is LARDER_NAMESPACE right?" in ended.stderr
    assert not (tmp_path / "wrong").exists()
