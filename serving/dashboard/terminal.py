"""`python -m serving top`: the dashboard of a running service in a terminal."""

import argparse
import functools
import os
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import orjson

from cache.errors import LarderError
from cache.process.command_line import json_text, missing_extra, printable_lines
from serving.cli.lookup import add_tls_options, tls_context

PROG = "python -m serving top"
FETCH_TIMEOUT_S = 5.0
_BODY_BYTES_MAX = 16 << 20
_STATUS_EXPLANATIONS = {
    401: "a token is required: pass --token or set LARDER_TOKEN",
    403: "this token lacks the scope admin",
    429: "this token has used up its quota for now",
    404: "no dashboard at this address: is it Larder, and is LARDER_DASHBOARD_S above 0?",
}


class NoDashboard(LarderError):
    """The document could not be fetched; the message says why."""

    code = "no_dashboard"


def fetch_document(url: str, token: str = "", tls: ssl.SSLContext | None = None) -> dict[str, Any]:
    """Fetch the dashboard document of the service at `url`; raise NoDashboard with the remedy."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise NoDashboard(f"--url must be like http://host:port or https://host:port, not {url!r}")
    request = Request(f"{url.rstrip('/')}/dashboard/data")  # noqa: S310  checked above
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=FETCH_TIMEOUT_S, context=tls) as response:  # noqa: S310
            document = orjson.loads(response.read(_BODY_BYTES_MAX))
    except HTTPError as error:
        raise NoDashboard(
            f"{url} answers {error.code}: {_STATUS_EXPLANATIONS.get(error.code, error.reason)}"
        ) from error
    except (URLError, OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NoDashboard(f"{url} cannot be reached: {reason}") from error
    except ValueError as error:
        raise NoDashboard(f"{url} does not answer with a dashboard: {error}") from error
    if not isinstance(document, dict) or not {"verdict", "series", "totals"} <= set(document):
        raise NoDashboard(f"{url} answers with something else than a dashboard")
    return document


def main(arguments: Sequence[str], *, prog: str = PROG) -> int:
    """Show the dashboard until Ctrl-C, or once; return the exit code, 2 if it cannot be shown."""
    options = argument_parser(prog).parse_args(arguments)
    if missing_extra_message := missing_extra("top", "top", "rich"):
        print(f"larder: {missing_extra_message}", file=sys.stderr)
        return 2
    try:
        tls = tls_context(options)
        body = fetch_document(options.url, options.token, tls)
        if options.json:
            print(printable_lines(json_text(body)))
        elif options.once:
            _print_screen(body)
        else:
            _watch(functools.partial(fetch_document, options.url, options.token, tls), options.every, body)
    except LarderError as error:
        print(printable_lines(f"larder: {error.message}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _print_screen(body: Mapping[str, Any]) -> None:
    from cache.process.console import SafeConsole
    from serving.dashboard.screen import draw_screen

    SafeConsole().print(draw_screen(body))


def _watch(fetch_body: Callable[[], dict[str, Any]], refresh_interval_s: float, body: dict[str, Any]) -> None:
    from rich.live import Live

    from cache.process.console import SafeConsole
    from serving.dashboard.screen import draw_screen

    with Live(draw_screen(body), console=SafeConsole(), screen=True, auto_refresh=False) as live_display:
        while True:
            live_display.refresh()
            time.sleep(refresh_interval_s)
            try:
                body, trouble = fetch_body(), None
            except NoDashboard as error:  # the service may be restarting: keep the last document
                trouble = error.message
            live_display.update(draw_screen(body, trouble))


def argument_parser(prog: str = PROG) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(prog=prog, description="The dashboard of a running service, in a terminal.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default %(default)s")
    parser.add_argument("--token", default=os.environ.get("LARDER_TOKEN", ""), help="default: LARDER_TOKEN")
    add_tls_options(parser)
    parser.add_argument("--once", action="store_true", help="print and exit")
    parser.add_argument("--json", action="store_true", help="once, for programs")
    parser.add_argument("--every", type=_parse_interval, default=2.0, help="seconds, default %(default)s")
    return parser


def _parse_interval(seconds_text: str) -> float:
    seconds = float(seconds_text)
    if not 0.5 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be 0.5 to 3600 seconds, not {seconds_text}")
    return seconds
