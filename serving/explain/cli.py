"""`python -m serving explain`: print a running service's explanation of its answer for an entity."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cache.process.command_line import printable
from serving.cli.lookup import ask_and_show, question_parser
from serving.requests.answers import STORED_SOURCES

Section = tuple[str, list[tuple[str, str]]]

_SHOWN_VALUES_MAX = 10
"""Number of a list's items, or of a vector's components, that are shown."""

PROG = "python -m serving explain"


def main(arguments: Sequence[str], *, prog: str = PROG) -> int:
    """Run the command; return 0 if explained, 1 if not (the reason goes to standard error), 2 for wrong usage."""
    parser = argument_parser(prog)
    return ask_and_show(parser.parse_args(arguments), parser, "explain", print_explanation)


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    return question_parser(
        prog,
        "Explain a running service's answer for an entity: the rung that would answer, the content of each rung, "
        "the record with its page and checksums, the model's current output, and the difference. The command "
        "changes nothing. Exit code: 0 explained, 1 service unreachable or refused, 2 wrong usage.",
    )


def print_explanation(explanation: Mapping[str, Any]) -> None:
    """Print the explanation to standard output."""
    title, sentence = (printable(f"{explanation['table']} {explanation['id']}"), printable(explanation["sentence"]))
    sections: list[Section] = [
        (name, [(printable(label), printable(text)) for label, text in rows])
        for name, rows in explanation_sections(explanation)
    ]
    try:
        from rich.markup import escape
        from rich.table import Table

        from cache.process.console import SafeConsole
    except ImportError:
        _print_plain(title, sentence, sections)
        return
    console = SafeConsole()
    if not console.is_terminal:
        _print_plain(title, sentence, sections)
        return
    console.print(f"[bold]{escape(title)}[/bold]: {escape(sentence)}", highlight=False)
    for section_name, section_rows in sections:
        table = Table(title=section_name, title_justify="left", show_header=False, box=None)
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for row_label, row_text in section_rows:
            table.add_row(row_label, escape(row_text))
        console.print(table, highlight=False)


def _print_plain(title: str, sentence: str, sections: list[Section]) -> None:
    print(f"{title}: {sentence}")
    for section_name, section_rows in sections:
        print(f"\n{section_name}")
        for row_label, row_text in section_rows:
            print(f"  {row_label:<14} {row_text}")
    sys.stdout.flush()


def explanation_sections(explanation: Mapping[str, Any]) -> Iterator[Section]:
    """Return the sections' names and values, in the order of the ladder."""
    answer = explanation["answer"]
    section_rows = [("tier", answer["tier"])]
    section_rows += [(field_name, answer[field_name]) for field_name in ("reason", "live") if answer[field_name]]
    section_rows += [("generation", f"{explanation['generation']} (epoch {explanation['epoch']})")]
    section_rows += [("published", explanation["published_at"]), ("age", _age_text(explanation["age_seconds"]))]
    section_rows += [
        (field_name, explanation[field_name]) for field_name in ("stale", "degraded") if explanation[field_name]
    ]
    yield "Answer", section_rows
    yield "Where", list(_location_rows(explanation))
    if (record := explanation["record"]) is not None:
        yield "Record", list(_record_rows(record))
    model = explanation["model"]
    section_rows = [("computed from", _text_or(model["computed_from"], "nothing"))]
    section_rows += [
        (field_name, str(model[field_name])) for field_name in ("reason", "precision") if model[field_name]
    ]
    section_rows += list(_prediction_rows(model))
    yield "Model now", section_rows
    if (events := explanation.get("events")) is not None:  # an earlier version of the service sends none
        event_texts = [f"{event['item']} ({event['position']})" for event in events["counted"]]
        section_rows = [("counted", _value_text(event_texts)), ("as of", events["as_of"])]
        yield "Newer events", [*section_rows, ("night's until", events["until"])]
    if (difference := explanation["difference"]) is not None:
        yield (
            "Difference",
            [(field_name.replace("_", " "), _value_text(value)) for field_name, value in difference.items()],
        )
    if (default := explanation.get("default")) is not None:
        yield "Default", list(_prediction_rows(default))


def _location_rows(explanation: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    directory = explanation["directory"]
    position_text = f"position {directory['position']} of {directory['entities']}"
    directory_text = position_text if directory["known"] else f"not among the {directory['entities']} of this night"
    yield "directory", f"{directory_text}, hash {directory['hash']}"
    if (page := explanation["page"]) is not None:
        yield "page", f"{page['key']}, byte {page['offset_bytes']} of {page['size_bytes']}"
        yield ("checksum", f"{page['state']}: {_text_or(page['checksum'])}, expected {_text_or(page['expected'])}")
    for tier in STORED_SOURCES:
        yield tier.upper(), _tier_text(explanation[tier])
    if (is_same_bytes := explanation["same_bytes"]) is not None:
        yield "same bytes", "yes" if is_same_bytes else "NO"
    if (previous := explanation["previous"]) is not None:
        previous_state = "has it" if previous["found"] else f"has not: {previous['reason']}"
        yield "previous", f"{previous['generation']} {previous_state}"


def _tier_text(tier_fields: Mapping[str, Any]) -> str:
    if not tier_fields["found"]:
        return str(tier_fields["reason"])
    remaining_s = tier_fields.get("expires_in_seconds")
    return f"there, {tier_fields['by']}" + ("" if remaining_s is None else f", for {remaining_s:.0f} s more")


def _record_rows(record_fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    scored_at = datetime.fromtimestamp(record_fields["scored_at"], UTC).isoformat(timespec="seconds")
    yield "made by", f"{record_fields['by']}, scored {scored_at}"
    yield "bytes", f"{record_fields['bytes']}, format {record_fields['format']}, {record_fields['count']} used"
    yield "fingerprint", record_fields["fingerprint"]
    yield from _prediction_rows(record_fields)


def _prediction_rows(prediction_fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if "items" in prediction_fields:
        items_and_scores = zip(prediction_fields["items"], prediction_fields["scores"], strict=True)
        yield "items", _value_text([f"{item} ({score:.5g})" for item, score in items_and_scores])
    for field_name in ("vector", "values"):
        if prediction_fields.get(field_name) is not None:
            yield field_name, _value_text([f"{number:.5g}" for number in prediction_fields[field_name]])


def _value_text(field_value: object) -> str:
    if isinstance(field_value, bool):
        return "yes" if field_value else "no"
    if isinstance(field_value, float):
        return f"{field_value:.6g}"
    if not isinstance(field_value, list):
        return _text_or(field_value)
    more_text = f", and {len(field_value) - _SHOWN_VALUES_MAX} more" if len(field_value) > _SHOWN_VALUES_MAX else ""
    return (", ".join(map(str, field_value[:_SHOWN_VALUES_MAX])) or "none") + more_text


def _text_or(field_value: object, text_if_none: str = "-") -> str:
    return text_if_none if field_value is None else str(field_value)


def _age_text(age_s: float) -> str:
    hours, minutes = divmod(int(age_s) // 60, 60)
    return f"{hours} h {minutes} min"
