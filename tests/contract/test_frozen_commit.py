"""The frozen commit: its id stands in a file, and where it cannot be had the message says what to do."""

import subprocess
from pathlib import Path

import pytest

from tests.checkouts import FROZEN_FILE, NoCheckout, checkout_of, frozen_commit


def test_the_file_holds_a_full_id() -> None:
    assert len(frozen_commit()) == 40
    assert FROZEN_FILE.read_text() == f"{frozen_commit()}\n"


def test_without_the_file_the_message_says_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(NoCheckout, match="holds the id of the frozen commit"):
        frozen_commit(tmp_path / "frozen_commit")


@pytest.mark.parametrize("text", ["", "main", "73c6cc9c", "g" * 40])
def test_what_is_no_full_id_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "frozen_commit"
    file.write_text(text)

    with pytest.raises(NoCheckout, match="40 hex digits"):
        frozen_commit(file)


def test_a_clone_without_the_commit_gets_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr("tests.checkouts.ROOT", tmp_path)

    with pytest.raises(NoCheckout, match="git fetch --unshallow"):
        checkout_of(frozen_commit(), cache=tmp_path / "checkouts")
