"""Who sent a token is known, and how it is compared tells nothing of any other."""

import hashlib
import hmac
import secrets
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.access.callers import ANYBODY, STRANGER, TOKEN_BYTES_MAX, Caller, CallerCounts, Callers
from serving.access.quota import QuotaTable
from serving.access.token_file import MEANING_BY_SCOPE, TokenEntry
from serving.requests.errors import Problem
from tests.fakes import FakeClock

TOKENS = {name: secrets.token_urlsafe(32) for name in ("ana", "ben", "cy")}


def entry(token: str, **changes: Any) -> TokenEntry:
    """Entry of a token that may read."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return TokenEntry(**{"sha256": digest, "scopes": ("read",), **changes})


def make_callers(clock: FakeClock | None = None, token: str = "", **changes: Any) -> Callers:
    """Callers of three named tokens, and perhaps of the one of the settings."""
    tokens = {name: entry(token_text, **changes) for name, token_text in TOKENS.items()}
    ticking = clock or FakeClock()
    return Callers.of(token, tokens, QuotaTable.create_private(), {}, clock=lambda: ticking.now_s)


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"a"), (b"authorization", b"Bearer " + token.encode())]


def test_every_token_has_its_owner() -> None:
    callers = make_callers(token="sesame")

    assert {name: callers.identify(bearer(token)).name for name, token in TOKENS.items()} == {
        name: name for name in TOKENS
    }
    default = callers.identify(bearer("sesame"))
    assert default.name == "default" and default.scopes == set(MEANING_BY_SCOPE) and not default.has_quota_or_expiry


def test_without_a_tokens_file_all_may_ask_and_with_an_empty_one_none_may() -> None:
    rows = QuotaTable.create_private()

    assert Callers.of("", None, rows, {}).identify([]) is ANYBODY
    assert Callers.of("", {}, rows, {}).identify(bearer("x")) is STRANGER


@pytest.mark.parametrize("header", [
    b"", b"Bearer", b"Bearer ", b"Bearer{}", b"Basic {}", b"{}", b"Bearer  {}", b"Bearer {} ", b"Bearer {}\x00",
    b"Bearer x{}",
])  # fmt: skip
def test_nothing_but_the_very_token_counts(header: bytes) -> None:
    header_value = header.replace(b"{}", TOKENS["ana"].encode())

    assert make_callers(token="sesame").identify([(b"authorization", header_value)]) is STRANGER


@pytest.mark.parametrize("scheme", [b"bearer", b"BEARER", b"beArer"])
def test_the_scheme_is_known_in_any_case_and_the_token_in_its_own_alone(scheme: bytes) -> None:
    token = TOKENS["ana"].encode()

    assert make_callers().identify([(b"authorization", scheme + b" " + token)]).name == "ana"
    assert make_callers().identify([(b"authorization", scheme + b" " + token.swapcase())]) is STRANGER


def test_the_first_header_counts() -> None:
    headers = [*bearer("wrong"), *bearer(TOKENS["ana"])]

    assert make_callers().identify(headers) is STRANGER
    assert make_callers().identify(headers[::-1]).name == "ana"


def test_a_token_beyond_ascii_is_known_in_both_encodings() -> None:
    callers = Callers.of("sésame", None, QuotaTable.create_private(), {})

    for encoding in ("utf-8", "latin-1"):
        header_value = b"Bearer " + "sésame".encode(encoding)
        assert callers.identify([(b"authorization", header_value)]).name == "default"


def test_a_thousand_wrong_tokens_all_cost_the_same_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    compare_digest, digest_of = hmac.compare_digest, hashlib.sha256
    callers, compared, hashed = (make_callers(token="sesame"), list[tuple[bytes, bytes]](), list[int]())

    def compare(left_digest: bytes, right_digest: bytes) -> bool:
        compared.append((left_digest, right_digest))
        return compare_digest(left_digest, right_digest)

    def sha256(data: bytes) -> Any:
        hashed.append(len(data))
        return digest_of(data)

    monkeypatch.setattr("serving.access.callers.hmac.compare_digest", compare)
    monkeypatch.setattr("serving.access.callers.hashlib.sha256", sha256)
    right = TOKENS["ana"]
    near = [right[:at] + ("-" if right[at] != "-" else "_") + right[at + 1 :] for at in range(40)]
    wrong = [*near, *(secrets.token_urlsafe(32) for _ in range(1_000))]

    for token in wrong:
        compared.clear()
        hashed.clear()
        assert callers.identify(bearer(token)) is STRANGER
        # Every known digest is compared, all of one length, whatever was sent and however much of it was right.
        assert len(compared) == len(TOKENS) + 1 and len(hashed) == 1
        assert {(len(left_digest), len(right_digest)) for left_digest, right_digest in compared} == {(32, 32)}
    for token in TOKENS.values():
        compared.clear()
        assert callers.identify(bearer(token)) is not STRANGER
        assert len(compared) == len(TOKENS) + 1


@given(st.binary(max_size=200))
def test_any_bytes_are_a_strangers(sent: bytes) -> None:
    assert make_callers().identify([(b"authorization", b"Bearer " + sent)]) is STRANGER


def test_what_is_too_long_is_bounded_before_it_is_hashed() -> None:
    token = "x" * TOKEN_BYTES_MAX
    callers = Callers.of("", {"a": entry(token)}, QuotaTable.create_private(), {})

    assert callers.identify(bearer(token)).name == "a"
    assert callers.identify(bearer(token + "y")) is STRANGER


def test_an_expired_token_is_refused_with_its_own_code() -> None:
    clock = FakeClock()
    clock.now_s = 1_000.0
    caller = make_callers(clock, expires_at="1970-01-01T00:16:41+00:00").identify(bearer(TOKENS["ana"]))
    assert caller.may_use_scope("read") and caller.is_known

    clock.now_s = 1_001.0

    assert not caller.may_use_scope("read") and not caller.is_known
    with pytest.raises(Problem) as refused:
        caller.require_scope("read")
    assert (refused.value.status, refused.value.reason) == (401, "token_expired")
    assert caller.counts.refusals_by_reason["expired"] == 1


def test_a_missing_scope_is_named() -> None:
    caller = Caller("ana", ("read", "score"), CallerCounts())
    caller.require_scope("score")

    with pytest.raises(Problem) as refused:
        caller.require_scope("admin")

    assert (refused.value.status, refused.value.reason) == (403, "scope_missing")
    assert refused.value.details == {"scope": "admin", "scopes": ["read", "score"]}
    with pytest.raises(Problem) as unknown:
        STRANGER.require_scope("read")
    assert (unknown.value.status, unknown.value.reason) == (401, "unauthorized")
