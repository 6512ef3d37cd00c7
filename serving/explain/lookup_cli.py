"""`python -m serving lookup`: asks a running service for one entity, and shows the answer."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cache.process.printable import printable
from serving.explain.asking import answer_to, question_parser

PROG = "python -m serving lookup"
_NUMBERS_SHOWN = 20
"""Numbers of a vector that are shown."""


def main(arguments: Sequence[str], *, prog: str = PROG) -> int:
    """Exit code: 0 answered, 1 not (the reason goes to standard error), 2 wrong usage."""
    parser = argument_parser(prog)
    return answer_to(parser.parse_args(arguments), parser, "lookup", _show)


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Parser of this command's arguments."""
    return question_parser(
        prog,
        "The answer of a running service for one entity of a table, and where it came from. --history and "
        "--features are what to compute from where nothing is stored. Exit code: 0 answered, 1 the service could not "
        "be asked or refused, 2 wrong usage.",
    )


def _show(document: Mapping[str, Any]) -> None:
    for line in lines_of(document["answers"][0] if "answers" in document else document):
        print(printable(line))


def lines_of(answer: Mapping[str, Any]) -> Iterator[str]:
    """An answer for eyes: what it is and where it came from, then an item or a number a line."""
    rows = list(_rows(answer))
    count_text = f"{len(rows)} items" if "items" in answer else f"{len(rows)} numbers"
    notes = [f"{name} {answer[name]}" for name in ("reason", "live", "stale") if answer.get(name)]
    age = f"{answer['age_seconds']:,.0f} s old"
    about = ", ".join([f"{count_text} from {answer['source']}", *notes, answer["generation"], age])
    yield f"{answer['table']} {answer['id']}: {about}"
    if (near := answer.get("near")) is not None:
        yield f"       the answer to an input {near:.3g} away was reused ([serving.near])"
    if dropped_count := answer.get("dropped_history"):
        yield f"       {dropped_count} of the history are no items of this generation, and count for nothing"
    if answer["source"] == "default" and answer.get("reason") == "not_in_generation":
        input_clause = (
            "what was sent is nothing to compute from"
            if answer.get("live")
            else "nothing was sent to compute from"
        )
        instead = "these items suit most users" if answer.get("items") else "there is no answer"
        yield f"       nothing is known of this id (is it right?), and {input_clause}: {instead}"
    for number, (name, value) in enumerate(rows, 1):
        if "vector" in answer and number > _NUMBERS_SHOWN:
            yield f"  ... and {len(rows) - _NUMBERS_SHOWN} more (--json)"
            return
        yield f"{number:>5}  {name}  {value:.6g}" if name else f"{number:>5}  {value:.6g}"


def _rows(answer: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if "items" in answer:
        yield from zip(answer["items"], answer["scores"], strict=True)
    elif "vector" in answer:
        yield from (("", number) for number in answer["vector"] or ())
    else:
        yield from zip(answer.get("labels", ()), answer.get("values") or (), strict=False)
