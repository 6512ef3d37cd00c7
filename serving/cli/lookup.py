"""`python -m serving lookup`: look up an entity in a running service; options, TLS and errors shared with `explain`."""

import argparse
import contextlib
import http.client
import os
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import orjson

from cache.errors import ConfigError
from cache.format.redis_keys import NAME_PATTERN
from cache.process.command_line import json_text, printable, printable_lines

PROG = "python -m serving lookup"
_BODY_BYTES_MAX = 64 << 20

_SHOWN_NUMBERS_MAX = 20
"""Number of a vector's components that are shown."""

_ANSWER_FIELDS = frozenset({"answer", "answers", "source"})
"""Fields by which a response is recognised: an explanation, a batch of answers and a single answer have one each."""


def main(arguments: Sequence[str], *, prog: str = PROG) -> int:
    """Run the command; return 0 if answered, 1 if not (the reason goes to standard error), 2 for wrong usage."""
    parser = argument_parser(prog)
    return ask_and_show(parser.parse_args(arguments), parser, "lookup", _show_answer)


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    return question_parser(
        prog,
        "Show a running service's answer for one entity of a table, and its source. If nothing is stored, the "
        "answer is computed from --history and --features. Exit code: 0 answered, 1 service unreachable or refused, "
        "2 wrong usage.",
    )


def _show_answer(answer_document: Mapping[str, Any]) -> None:
    for line in answer_lines(answer_document["answers"][0] if "answers" in answer_document else answer_document):
        print(printable(line))


def answer_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as lines: a summary with its source, then one item or number per line."""
    answer_rows = list(_answer_rows(answer))
    count_text = f"{len(answer_rows)} items" if "items" in answer else f"{len(answer_rows)} numbers"
    note_texts = [f"{name} {answer[name]}" for name in ("reason", "live", "stale") if answer.get(name)]
    age_text = f"{answer['age_seconds']:,.0f} s old"
    summary_text = ", ".join([f"{count_text} from {answer['source']}", *note_texts, answer["generation"], age_text])
    yield f"{answer['table']} {answer['id']}: {summary_text}"
    if (near := answer.get("near")) is not None:
        yield f"       the answer to another input at distance {near:.3g} was reused ([serving.near])"
    if dropped_count := answer.get("dropped_history"):
        yield f"       {dropped_count} ids of the history are not items of this generation, and are ignored"
    if answer["source"] == "default" and answer.get("reason") == "not_in_generation":
        input_clause = (
            "no answer can be computed from what was sent" if answer.get("live") else "no history or features were sent"
        )
        instead_text = "these items are the defaults, the same for all users" if answer.get("items") else "no answer"
        yield f"       the generation does not know this id (is it right?), and {input_clause}: {instead_text}"
    for row_number, (row_name, row_value) in enumerate(answer_rows, 1):
        if "vector" in answer and row_number > _SHOWN_NUMBERS_MAX:
            yield f"  ... and {len(answer_rows) - _SHOWN_NUMBERS_MAX} more (--json)"
            return
        yield (f"{row_number:>5}  {row_name}  {row_value:.6g}" if row_name else f"{row_number:>5}  {row_value:.6g}")


def _answer_rows(answer: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if "items" in answer:
        yield from zip(answer["items"], answer["scores"], strict=True)
    elif "vector" in answer:
        yield from (("", number) for number in answer["vector"] or ())
    else:
        yield from zip(answer.get("labels", ()), answer.get("values") or (), strict=False)


class QuestionFailed(Exception):
    """The service could not be reached, or refused the request; the message says what to do."""


def question_parser(prog: str, command_description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that asks a service for one entity of a table."""
    parser = argparse.ArgumentParser(prog=prog, description=command_description)
    parser.add_argument("table", help="name of a table; /v1/generations lists them")
    parser.add_argument("entity", help="id of the entity; 7 and 007 are different ids")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--token", help="default: the environment variable LARDER_TOKEN")
    add_tls_options(parser)
    parser.add_argument("--k", type=int, help="number of items in the list (default: all)")
    parser.add_argument("--generation", help="a generation that the service holds (default: the live one)")
    parser.add_argument(
        "--history", help="item ids to compute from, oldest first, separated by commas; @FILE: one id per line"
    )
    parser.add_argument("--features", metavar="JSON", help="features to compute from, by column")
    parser.add_argument("--filter", metavar="JSON", help='a declared one\'s name, or {"<": ["price", 20]}')
    parser.add_argument("--rerank", metavar="JSON", help='a declared one\'s name, or {"diversify": {"mmr": 0.7}}')
    parser.add_argument("--as-of", help="use newer events only up to this position or time (default: all)")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds (default: 10)")
    parser.add_argument("--json", action="store_true", help="print the service's response unchanged")
    return parser


def ask_and_show(
    arguments: argparse.Namespace,
    parser: argparse.ArgumentParser,
    api_route: str,
    show_answer: Callable[[dict[str, Any]], None],
) -> int:
    """Ask `/v1/ROUTE/TABLE` and show the answer; return 0, or 1 after a printed error; exit with 2 for wrong usage."""
    try:
        service_address = _parse_url(arguments.url)
        question_body, tls = question_of(arguments), tls_context(arguments)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    try:
        document = send_question(service_address, arguments, question_body, tls, api_route=api_route)
    except QuestionFailed as error:
        print(printable_lines(f"larder: {error}"), file=sys.stderr)
        return 1
    if arguments.json:
        print(printable_lines(json_text(document)))
    else:
        show_answer(document)
    return 0


def _parse_url(url: str) -> tuple[str, str, int, str]:
    url_parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = url_parts.port
    except ValueError as error:
        raise ValueError(f"--url {url!r}: {error}") from error
    if url_parts.scheme not in ("http", "https") or not url_parts.hostname:
        raise ValueError(f"--url must be like http://host:port or https://host, not {url!r}")
    port = port or (443 if url_parts.scheme == "https" else 80)
    return url_parts.scheme, url_parts.hostname, port, url_parts.path.rstrip("/")


def question_of(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the body of a POST request; None if a GET is enough. Raise ValueError for malformed options."""
    if all(
        argument is None for argument in (arguments.history, arguments.features, arguments.filter, arguments.rerank)
    ):
        return None
    entity_fields: dict[str, Any] = {"id": arguments.entity}
    if arguments.history is not None:
        entity_fields["history"] = _read_history(arguments.history)
    if arguments.features is not None:
        entity_fields["features"] = _parse_json(arguments.features, "--features")
    option_fields: dict[str, Any] = {"k": arguments.k, "generation": arguments.generation, "as_of": arguments.as_of}
    if arguments.filter is not None:
        is_name = NAME_PATTERN.fullmatch(arguments.filter)
        option_fields["filter"] = arguments.filter if is_name else _parse_json(arguments.filter, "--filter")
    if arguments.rerank is not None:
        is_json = arguments.rerank.startswith("{")
        option_fields["rerank"] = _parse_json(arguments.rerank, "--rerank") if is_json else arguments.rerank
    return {"entities": [entity_fields]} | {k: v for k, v in option_fields.items() if v is not None}


def _parse_json(json_text_of_option: str, option_name: str) -> Any:
    try:
        return orjson.loads(json_text_of_option)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{option_name} must be a JSON object: {error}") from error


def _read_history(history_text: str) -> list[str]:
    if not history_text.startswith("@"):
        return [item_id.strip() for item_id in history_text.split(",") if item_id.strip()]
    try:
        # Not `splitlines`, which also splits at other characters, and ids may contain those.
        file_lines = Path(history_text[1:]).read_text(encoding="utf-8-sig").split("\n")
        return [line.strip() for line in file_lines if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--history: {error}") from error


def send_question(
    service_address: tuple[str, str, int, str],
    arguments: argparse.Namespace,
    question_body: dict[str, Any] | None,
    tls: ssl.SSLContext | None = None,
    *,
    api_route: str,
) -> dict[str, Any]:
    """Send the request and return the service's answer; raise QuestionFailed."""
    scheme, host, port, root_path = service_address
    service_url = f"{scheme}://{host}:{port}{root_path}"
    token = arguments.token if arguments.token is not None else os.environ.get("LARDER_TOKEN", "")
    headers = {"Authorization": f"Bearer {token}".encode()} if token else {}
    request_path = f"{root_path}/v1/{api_route}/{quote(arguments.table, safe='')}"
    if question_body is None:
        options = {"k": arguments.k, "generation": arguments.generation, "as_of": arguments.as_of}
        query = "&".join(f"{k}={quote(str(v), safe='')}" for k, v in options.items() if v is not None)
        request_path += f"/{quote(arguments.entity, safe='')}" + (f"?{query}" if query else "")
    http_connection: http.client.HTTPConnection
    if scheme == "https":
        http_connection = http.client.HTTPSConnection(host, port, timeout=arguments.timeout, context=tls)
    else:
        http_connection = http.client.HTTPConnection(host, port, timeout=arguments.timeout)
    try:
        with contextlib.closing(http_connection) as connection:
            connection.request(
                "GET" if question_body is None else "POST",
                request_path,
                body=None if question_body is None else orjson.dumps(question_body),
                headers=headers,
            )
            response = connection.getresponse()
            response_body = response.read(_BODY_BYTES_MAX)
    except TimeoutError as error:
        raise QuestionFailed(f"{service_url} did not answer within {arguments.timeout:g} s (--timeout)") from error
    except (OSError, http.client.HTTPException) as error:
        raise QuestionFailed(
            f"{service_url} cannot be reached: {error or type(error).__name__}; is --url the address of a running "
            f"service{'' if scheme == 'https' else ', and does it speak http, not https'}?"
        ) from error
    return _checked_answer(service_url, response.status, response_body, has_token=bool(token))


def _checked_answer(service_url: str, http_status: int, response_body: bytes, *, has_token: bool) -> dict[str, Any]:
    try:
        document = orjson.loads(response_body)
    except orjson.JSONDecodeError:
        document = None
    if http_status == 200 and isinstance(document, dict) and _ANSWER_FIELDS & document.keys():
        return document
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, Mapping):
        raise QuestionFailed(
            f"{service_url} answered {http_status}, but not with a response of Larder; is --url right?"
        )
    if error.get("code") == "unauthorized" and has_token:
        raise QuestionFailed(f"{service_url} does not know this token (--token, or LARDER_TOKEN)")
    raise QuestionFailed(f"{service_url}: {error.get('message', http_status)}{_remedy_for_refusal(error)}")


def _remedy_for_refusal(error_fields: Mapping[str, Any]) -> str:
    match error_fields.get("code"):
        case "unauthorized":
            return " (--token, or LARDER_TOKEN)"
        case "scope_missing":
            return " (another --token)"
        case "unknown_table":
            return f"; its tables are {', '.join(error_fields.get('tables', ()))}"
        case "not_found":
            return "; this version of the service does not support the command, or --url has a superfluous path"
        case "not_ready":
            return "; publish a generation, or wait until it is loaded (/readyz)"
        case "generation_gone":
            return f"; it holds {', '.join(error_fields.get('held', ()))}"
        case "overloaded":
            return "; try again in a moment"
        case _:
            return ""


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add the options `--ca`, `--cert` and `--key` to the parser of a command that asks a service."""
    parser.add_argument(
        "--ca", metavar="FILE", default=os.environ.get("LARDER_CA"),
        help="PEM file of the authority that signed the service's certificate (default: LARDER_CA, else the system's)",
    )  # fmt: skip
    parser.add_argument("--cert", metavar="FILE", help="PEM file of a client certificate")
    parser.add_argument("--key", metavar="FILE", help="PEM file of the client certificate's key")


def tls_context(options: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the TLS context of these options, None if none was given; raise ConfigError for an unusable file."""
    if not (options.ca or options.cert):
        return None
    try:
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.cert:
            context.load_cert_chain(options.cert, options.key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--ca, --cert or --key cannot be used: {error}", field="ca") from None
    return context
