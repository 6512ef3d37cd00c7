"""Ids come from whoever calls: what one holds is shown by the commands, and never run by the terminal."""

from typing import Any

import pytest

from serving.cli import lookup
from serving.explain import cli

HOSTILE = "u\x1b[31m\n\x9b2J"
ESCAPED_ID = r"u\u001b[31m\u000a\u009b2J"
ANSWER = {
    "table": "user_topk", "id": HOSTILE, "source": "l2", "generation": "g", "age_seconds": 7.0,
    "items": [HOSTILE, "b"], "scores": [0.5, 0.25],
}  # fmt: skip
EXPLANATION = {
    "table": "user_topk", "id": HOSTILE, "sentence": f"{HOSTILE} is unknown.", "generation": "g", "epoch": 1,
    "published_at": "2026-01-31T00:00:00Z", "age_seconds": 7.0, "stale": None, "degraded": None,
    "answer": {"tier": "default", "reason": None, "live": None},
    "directory": {"position": 1, "entities": 2, "known": False, "hash": "00"},
    "page": None, "l1": {"found": False, "reason": "x"}, "l2": {"found": False, "reason": "x"},
    "same_bytes": None, "previous": None, "record": None, "difference": None,
    "model": {"computed_from": None, "reason": None, "precision": None, "items": [HOSTILE], "scores": [1.0]},
}  # fmt: skip


@pytest.mark.parametrize("cli_options", [[], ["--json"]])
@pytest.mark.parametrize(("command", "service_reply"), [(lookup, ANSWER), (cli, EXPLANATION)])
def test_an_id_cannot_steer_the_terminal(
    command: Any,
    service_reply: dict[str, Any],
    cli_options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(lookup, "send_question", lambda *_, **__: service_reply)

    assert command.main(["user_topk", "u", *cli_options]) == 0

    printed = capsys.readouterr().out
    assert not {"\x1b", "\x9b"} & set(printed)
    assert cli_options or printed.count(ESCAPED_ID) >= 2


def test_what_a_service_refuses_an_id_with_cannot_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise lookup.QuestionFailed(f"refused: {HOSTILE}")

    monkeypatch.setattr(lookup, "send_question", refuse)

    assert lookup.main(["user_topk", "u"]) == 1
    assert not {"\x1b", "\x9b"} & set(capsys.readouterr().err)
