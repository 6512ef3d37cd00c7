"""An answer for eyes: what a reader may have mistyped is said."""

from pathlib import Path

import pytest

from serving.cli.lookup import answer_lines, argument_parser, question_of

ANSWER = {
    "table": "user_topk", "id": "c42", "source": "l2", "generation": "g", "age_seconds": 7.0,
    "items": ["a"], "scores": [0.5],
}  # fmt: skip


@pytest.mark.parametrize(
    ("answer_fields", "expected_remark"),
    [
        ({}, None),
        (
            {"source": "default", "reason": "not_in_generation"},
            "no history or features were sent: these items are the defaults",
        ),
        (
            {"source": "default", "reason": "not_in_generation", "live": "no_usable_input"},
            "no answer can be computed from what was sent: these items are the defaults",
        ),
        ({"source": "default", "reason": "entity_blocked"}, None),
        ({"dropped_history": 2}, "2 ids of the history are not items of this generation"),
    ],
)
def test_what_may_be_a_mistake_is_said_below_the_answer(
    answer_fields: dict[str, object], expected_remark: str | None
) -> None:
    lines = list(answer_lines({**ANSWER, **answer_fields}))

    assert lines[0].startswith("user_topk c42: 1 items from ")
    assert len(lines) == (2 if expected_remark is None else 3)
    assert expected_remark is None or expected_remark in lines[1]


def test_no_items_are_not_said_to_suit_anybody() -> None:
    answer_fields = {"source": "default", "reason": "not_in_generation", "items": [], "scores": []}

    lines = list(answer_lines({**ANSWER, **answer_fields}))

    assert lines[1].endswith("no history or features were sent: no answer")


@pytest.mark.parametrize("text", ["a,b", "a, b", " a ,b,", "@ids.txt"])
def test_a_history_may_have_spaces_between_its_ids(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ids.txt").write_text("a\nb\n")
    arguments = argument_parser().parse_args(["t", "u", "--history", text])

    assert question_of(arguments) == {"entities": [{"id": "u", "history": ["a", "b"]}]}


def test_only_line_breaks_end_an_id_of_a_history_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ids.txt").write_bytes("\ufeffa\u2028b\r\nc\n".encode())
    arguments = argument_parser().parse_args(["t", "u", "--history", "@ids.txt"])

    assert question_of(arguments) == {"entities": [{"id": "u", "history": ["a\u2028b", "c"]}]}
