"""The corpus of request streams in corpus.txt, whose first lines describe its format."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.txt")
GET = b"GET /v1/lookup/user_topk/%b?k=1 HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /v1/lookup/user_topk HTTP/1.1\r\nHost: a\r\n"
BODY = b'{"entities":["%b"],"k":1}'

_HEADING = re.compile(r"== (?P<name>.+): (?P<taken>\d+) taken(?P<refused>, refused(?P<bounds> by bounds)?)?")
_ESCAPE = re.compile(rb"\\(r|n|t|0|\\|x[0-9a-f]{2})")
_REPEATED = re.compile(r"<<(?P<text>.+)\*(?P<count>\d+)>>")
_SIMPLE = {b"r": b"\r", b"n": b"\n", b"t": b"\t", b"0": b"\0", b"\\": b"\\"}


@dataclass(frozen=True)
class Case:
    """A stream of requests, the number of them to answer, and whether the rest is to be refused."""

    name: str
    stream: bytes
    accepted_count: int
    is_refused: bool
    is_bounded: bool
    """The refusal is that of a bound, which not every transport has."""


def read_corpus(path: Path = CORPUS) -> list[Case]:
    """Read all cases; raise ValueError for a line outside of any case, and for two cases of one name."""
    cases: list[Case] = []
    for line in path.read_text().splitlines():
        if not line or line.startswith("--"):
            continue
        if heading := _HEADING.fullmatch(line):
            name, taken_count = heading["name"], int(heading["taken"])
            cases.append(Case(name, b"", taken_count, bool(heading["refused"]), bool(heading["bounds"])))
        elif line.startswith("== ") or not cases:
            raise ValueError(f"{path.name}: {line!r} is no heading, and stands in no case")
        else:
            cases[-1] = replace(cases[-1], stream=cases[-1].stream + _bytes_of(line))
    if len({case.name for case in cases}) != len(cases):
        raise ValueError(f"{path.name}: two cases have one name")
    return cases


def get(user: str) -> bytes:
    """Return a GET of one id."""
    return GET % user.encode()


def post(user: str) -> bytes:
    """Return a POST of one id, with its length."""
    body = BODY % user.encode()
    return POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def _bytes_of(line: str) -> bytes:
    if line.startswith("@GET "):
        return get(line.removeprefix("@GET "))
    if line.startswith("@BODY "):
        return BODY % line.removeprefix("@BODY ").encode()
    if line == "@POST":
        return POST
    if (repeated := _REPEATED.search(line)) is not None:
        prefix, after = line[: repeated.start()], line[repeated.end() :]
        middle = _bytes_of(repeated["text"]) * int(repeated["count"])
        return _unescaped(prefix) + middle + _unescaped(after)
    return _unescaped(line)


def _unescaped(text: str) -> bytes:
    return _ESCAPE.sub(_character, text.encode())


def _character(match: re.Match[bytes]) -> bytes:
    return _SIMPLE.get(match[1]) or bytes([int(match[1][1:], 16)])
