"""Refused requests, by the code that they get, and bytes that are not a request."""

from collections.abc import Callable
from typing import Any, Final

import orjson
import pyarrow as pa

from tests.contract.side_by_side.differences import ARROW
from tests.contract.side_by_side.draws import BAD_FEATURES, BAD_IDS, Draw
from tests.contract.side_by_side.exchange import HOST, Request
from tests.contract.side_by_side.world import LIMITS

_JSON: Final = ("Content-Type", "application/json")
_LOOKUP: Final = "/v1/lookup/user_topk"
_TARGETS: Final = (_LOOKUP, "/v1/lookup", "/v1/score", "/v1/feedback", "/v1/events", "/v1/explain/user_topk")


def _post(target: str, body: object, *headers: tuple[str, str]) -> Request:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    return Request("refused", "POST", target, headers or (_JSON,), content)


def _unknown_route(draw: Draw) -> Request:
    target = draw.rng.choice(
        ("/", "/v1", "/v2/lookup/user_topk/x", "/v1/lookup/", "/v1/%6cookup/user_topk/x", "//", "/x")
    )
    return Request("refused", draw.rng.choice(("GET", "POST")), target)


def _unknown_table(draw: Draw) -> Request:
    table = draw.rng.choice(("nothing", "user_topk.in_stock", "%ff", "user%20topk", "USER_TOPK"))
    if draw.chance(0.5):
        return Request("refused", "GET", f"/v1/lookup/{table}/{draw.facts.users[0]}")
    return _post("/v1/lookup", {"entities": [{"id": "x", "table": table}]})


def _wrong_method(draw: Draw) -> Request:
    method = draw.rng.choice(("PUT", "DELETE", "PATCH", "OPTIONS", "GET", "POST"))
    target = draw.rng.choice((*_TARGETS, "/healthz", "/readyz", "/metrics", "/v1/generations", f"{_LOOKUP}/x"))
    return Request("refused", method, target)


def _wrong_form(draw: Draw) -> Request:
    header = draw.rng.choice((
        ("Accept", "text/html"), ("Accept", "application/json;q=0"), ("Accept", f"{ARROW};q=0.5, application/json"),
        ("Accept", "application/*"), ("Accept", "*/*;q=0.1"), ("Content-Type", "text/plain"),
        ("Content-Type", "application/json; charset=utf-8"), ("Content-Type", "application/xml"),
        ("Content-Encoding", "gzip"), ("Content-Encoding", "identity"), ("Content-Encoding", "br, gzip"),
        ("Content-Type", ARROW),
    ))  # fmt: skip
    return _post(draw.rng.choice(_TARGETS), {"entities": ["u-00042"]}, header)


def _no_json(draw: Draw) -> Request:
    body = draw.rng.choice((
        b"", b"{", b"[]", b"null", b'"x"', b"5", b"NaN", b'{"entities": [NaN]}', b"\xff", b'{"entities": ["\\ud800"]}',
        b'{"entities": ["a",]}', b"\xef\xbb\xbf{}", b"{}", b'{"entities": []}', b'{"entities": {}}', b'{"entities": 5}',
        b'{"entities": ["a"], "entities": ["b"]}', b"[" * 600, b'{"entities": [{"id": "a", "colour": 1}]}',
        b'{"events": []}', b'{"events": {}}', b'{"events": [{"id": "x", "user": "\\ud800"}]}', b'{"user": "x"}',
        b'{"user": "x", "items": []}', b'{"user": "x", "items": [5.5]}', b'{"items": ["a"]}',
        b'{"user": {}, "items": ["a"]}',
    ))  # fmt: skip
    return _post(draw.rng.choice(_TARGETS), body)


def _no_stream(draw: Draw) -> Request:
    ids = pa.table({"id": ["a", "b"]})
    body = draw.rng.choice((
        b"", b"x", b"\xff\xff\xff\xff\x00\x00\x00\x00", _stream(ids)[:-30], _stream(ids, "zstd"), _stream(ids, "lz4"),
        _stream(pa.table({"id": ["a", None]})), _stream(pa.table({"name": ["a"]})), _stream(pa.table({"id": [1, 2]})),
        _stream(pa.table({"id": ["a"], "k": [5]})), _stream(pa.table({"id": pa.array(["a"]).dictionary_encode()})),
        _stream(pa.table({"id": pa.array([], pa.utf8())})), _stream(pa.table({"id": [""]})),
        _stream(pa.table({"id": ["a" * 257]})), _stream(pa.table({"id": ["a"] * 1_001})),
        _stream(ids.replace_schema_metadata({"colour": "blue"})),
        _stream(ids.replace_schema_metadata({"pandas": "{}"})),
        _stream(pa.concat_tables([pa.table({"id": ["a"]})] * 70)),
    ))  # fmt: skip
    return _post(_LOOKUP, body, ("Content-Type", ARROW))


def _bad_id(draw: Draw) -> Request:
    bad_id = draw.rng.choice(BAD_IDS)
    body: Any = draw.rng.choice((
        {"entities": [bad_id]}, {"entities": ["a", {"id": bad_id}]}, {"entities": [{"id": "a", "history": [bad_id]}]},
        {"entities": [{"history": "x"}]}, {"entities": [{}]}, {"entities": [{"id": None}]}, {"entities": [None]},
    ))  # fmt: skip
    if draw.chance(0.2):
        target = draw.rng.choice((f"{_LOOKUP}/", f"{_LOOKUP}/%ff", f"{_LOOKUP}/{'a' * 257}", f"{_LOOKUP}/%zz", _LOOKUP))
        return Request("refused", "GET", target)
    return _post(_LOOKUP, body)


def _bad_features(draw: Draw) -> Request:
    entity = {"id": draw.user(), "features": draw.rng.choice(BAD_FEATURES)}
    if draw.chance(0.3):
        entity["history"] = draw.history()
    return _post(f"/v1/lookup/{draw.rng.choice(('user_topk', 'user_mood', 'item_vector'))}", {"entities": [entity]})


def _too_much(draw: Draw) -> Request:
    history = [f"i-{number}" for number in range(250)]
    body: Any = draw.rng.choice((
        {"entities": ["a"] * 1_001},
        {"entities": [{"history": history + history}]},
        {"entities": ["a"], "exclude": history + history},
        {"entities": [{"history": history}] * 7},
        {"entities": [{"features": {"country": 1, "other": [0.5] * 1_000}}] * 4},
        {"entities": [{"id": "a"}] * 9_000},
        {"entities": ["a"], "padding": "x" * (LIMITS["body_bytes"] + 1)},
        {"events": [{"id": "x"}] * 1_001},
        {"user": "a", "items": ["a"] * 1_001},
    ))  # fmt: skip
    target = "/v1/events" if "events" in body else "/v1/score" if "user" in body else _LOOKUP
    return _post(target, body)


def _bad_feedback(draw: Draw) -> Request:
    body: Any = draw.rng.choice((
        {}, {"event": "click"}, {"event": "Click!", "canary_key": "k"}, {"event": "click", "canary_key": ""},
        {"event": "click", "canary_key": "k", "generation": "g"}, {"event": "click", "canary_key": "k", "count": 0},
        {"event": "click", "arm": "x"}, {"event": "click", "generation": 5}, {"canary_key": "k"},
        {"event": "click", "canary_key": "k", "count": True}, {"event": "click", "canary_key": "k", "colour": 1},
    ))  # fmt: skip
    return _post("/v1/feedback", body)


def _bad_header(draw: Draw) -> Request:
    header = draw.rng.choice((
        ("X-Deadline-Ms", "soon"), ("X-Deadline-Ms", "0"), ("X-Deadline-Ms", "-1"), ("X-Larder-Arm", "x"),
        ("X-Larder-Arm", "ranker=nothing"), ("X-Larder-Canary-Key", ""), ("X-Larder-Canary-Key", "a" * 300),
    ))  # fmt: skip
    if draw.chance(0.5):
        return Request("refused", "GET", f"{_LOOKUP}/{draw.facts.users[7]}", (header,))
    return _post(_LOOKUP, {"entities": [draw.facts.users[7]]}, _JSON, header)


def _explained(draw: Draw) -> Request:
    body: Any = draw.rng.choice((
        {"entities": ["a", "b"]}, {"entities": ["a"], "arm": "ranker=b"},
        {"entities": [{"id": "a", "features": {"country": "x"}}]},
        {"entities": ["a"], "k": 99}, {"entities": ["a"], "generation": "nothing"},
    ))  # fmt: skip
    return _post("/v1/explain/user_topk", body)


REFUSALS: Final[tuple[Callable[[Draw], Request], ...]] = (
    _unknown_route, _unknown_table, _wrong_method, _wrong_form, _no_json, _no_json, _no_stream, _bad_id, _bad_features,
    _too_much, _bad_feedback, _bad_header, _explained,
)  # fmt: skip
"""Ways to be refused, some of them within what is allowed by a hair."""


def _stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _wired(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


_HOST: Final = f"Host: {HOST}"
WIRES: Final = (
    _wired("GET /healthz HTTP/1.1"),
    _wired("GET /healthz HTTP/1.1", _HOST, _HOST),
    _wired("GET /healthz HTTP/1.1", "Host: a b"),
    _wired("GET /healthz HTTP/2.0", _HOST),
    _wired("GET /healthz HTTP/1.0"),
    _wired("GET  /healthz HTTP/1.1", _HOST),
    _wired("GET /healthz", _HOST),
    _wired("CONNECT larder.test:80 HTTP/1.1", _HOST),
    _wired("POST /v1/lookup/user_topk HTTP/1.1", _HOST, "Content-Length: -1"),
    _wired("POST /v1/lookup/user_topk HTTP/1.1", _HOST, "Content-Length: 2", "Content-Length: 3", body=b"{}"),
    _wired("POST /v1/lookup/user_topk HTTP/1.1", _HOST, "Transfer-Encoding: gzip"),
    _wired("POST /v1/lookup/user_topk HTTP/1.1", _HOST, "Transfer-Encoding: chunked", body=b"xx\r\n"),
    _wired("POST /v1/feedback HTTP/1.1", _HOST, "Transfer-Encoding: chunked", body=b"2\r\n{}\r\n0\r\nX: y\r\n\r\n"),
    _wired("GET /healthz HTTP/1.1", _HOST, "Connection: close"),
    _wired("GET /healthz HTTP/1.1", _HOST, "Upgrade: h2c", "Connection: upgrade"),
    _wired("GET /healthz HTTP/1.1", _HOST, "Bad Name: x"),
    _wired("GET /healthz HTTP/1.1", _HOST, "X-Long: " + "x" * 40_000),
    b"GET /healthz HTTP/1.1\nHost: larder.test\n\n",
    b"\x00\x01\x02\r\n\r\n",
)
"""What is no valid HTTP, or just so: refused in a plain text, and the connection ends."""
