"""Parsing: what is accepted, and that everything else is refused with the field at fault."""

import contextlib
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.requests.errors import Problem
from serving.requests.models import FeedbackReport, LookupRequest, ScoreRequest
from serving.requests.options import Limits, with_headers
from serving.requests.parsing import feedback_from_json, lookup_from_body, lookup_from_url, pop_content, score_from_json
from tests.unit.serving.world import LIMITS

PREFIX = b"/v1/lookup/"


def lookup_body(raw: bytes, table: str | None, limits: Limits) -> LookupRequest:
    return lookup_from_body({}, raw, "json", table, limits)


def score_body(raw: bytes, limits: Limits) -> ScoreRequest:
    return score_from_json(pop_content({}, raw, "json", limits), limits)


def refused(body: object, table: str | None = "t") -> tuple[int, str, str | None]:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    with pytest.raises(Problem) as caught:
        lookup_body(raw, table, LIMITS)
    return caught.value.status, caught.value.reason, caught.value.field


def url_refused(path: bytes, query: bytes = b"") -> tuple[str, str | None]:
    with pytest.raises(Problem) as caught:
        lookup_from_url(PREFIX + path, PREFIX, query, LIMITS)
    assert caught.value.status == 422
    return caught.value.reason, caught.value.field


@pytest.mark.parametrize(
    ("path", "id_"),
    [
        (b"t/007", "007"),
        (b"t/a/b/c", "a/b/c"),
        (b"t/a%2Fb", "a/b"),
        (b"t/%C3%A9%20%25", "é %"),
        (b"t/..%2F..", "../.."),
        (b"t/1.0", "1.0"),
        (b"t/a?b".replace(b"?", b"%3F"), "a?b"),
        (b"t/" + b"%C3%A9" * 128, "é" * 128),
    ],
)
def test_the_id_in_a_path_is_taken_as_it_is(path: bytes, id_: str) -> None:
    lookup = lookup_from_url(PREFIX + path, PREFIX, b"", LIMITS)

    assert (lookup.entities[0].table, lookup.entities[0].id) == ("t", id_)
    assert lookup.entities[0].raw_id == id_.encode()


def test_a_malformed_id_in_a_path_is_refused() -> None:
    assert url_refused(b"t/") == ("invalid_id", "id")
    assert url_refused(b"t/%FF%FE") == ("invalid_id", "id")
    assert url_refused(b"t/" + b"x" * 257) == ("invalid_id", "id")


def test_query_parameters_are_read_and_checked() -> None:
    query = b"k=7&fresh=true&max_age_seconds=1.5&generation=g&deadline_ms=20"

    options = lookup_from_url(PREFIX + b"t/a", PREFIX, query, LIMITS).options

    assert (options.k, options.fresh, options.max_age_s) == (7, True, 1.5)
    assert (options.generation, options.deadline_s) == ("g", 0.02)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (b"k=0", "k"), (b"k=-1", "k"), (b"k=1.5", "k"), (b"k=ten", "k"), (b"k=", "k"),
        (b"k=9999999999999999999999", "k"), (b"k=%D9%A1", "k"),
        (b"k=--5", "k"), (b"k=-", "k"), (b"k=5-", "k"), (b"k=1_0", "k"), (b"k=%2B5", "k"),
        (b"deadline_ms=1_0", "deadline_ms"), (b"deadline_ms=--5", "deadline_ms"),
        (b"deadline_ms=%D9%A1", "deadline_ms"),
        (b"deadline_ms=1e999", "deadline_ms"), (b"max_age_seconds=1_0", "max_age_seconds"),
        (b"max_age_seconds=", "max_age_seconds"),
        (b"fresh=maybe", "fresh"), (b"max_age_seconds=nan", "max_age_seconds"),
        (b"max_age_seconds=-1", "max_age_seconds"), (b"deadline_ms=inf", "deadline_ms"),
        (b"deadline_ms=0", "deadline_ms"), (b"limit=3", "limit"), (b"k=%FF", "query"),
    ],
)  # fmt: skip
def test_a_bad_query_names_its_field(query: bytes, field: str) -> None:
    assert url_refused(b"t/a", query)[1] == field


def test_a_k_that_is_too_long_is_not_called_no_number() -> None:
    with pytest.raises(Problem, match="at most 18 digits, not 19"):
        lookup_from_url(PREFIX + b"t/a", PREFIX, b"k=" + b"9" * 19, LIMITS)

    # The parser does not know how many items the table holds.
    assert lookup_from_url(PREFIX + b"t/a", PREFIX, b"k=1000000000", LIMITS).options.k == 10**9


def test_all_histories_and_exclude_together_are_limited() -> None:
    limits = replace(LIMITS, max_ids=100)
    half = [{"id": "a", "history": ["x"] * 50}]
    allowed = {"entities": [*half, "b"], "exclude": ["y"] * 50}

    assert len(lookup_body(orjson.dumps(allowed), "t", limits).entities) == 2
    for body in ({"entities": half * 2, "exclude": ["y"]}, {"entities": half * 3}):
        with pytest.raises(Problem) as caught:
            lookup_body(orjson.dumps(body), "t", limits)
        assert (caught.value.status, caught.value.reason) == (422, "too_many_ids")
        assert caught.value.details["limit"] == 100


def test_numbers_of_a_vector_stay_what_they_are() -> None:
    raw_body = b'{"entities": [{"id": "a", "features": {"whole": [1, 2], "mixed": [1, 0.5]}}]}'

    features = lookup_body(raw_body, "t", LIMITS).entities[0].features

    assert features == {"whole": (1, 2), "mixed": (1, 0.5)}
    assert [type(number) for number in features["whole"]] == [int, int]  # type: ignore[union-attr]


def test_a_feature_may_be_a_list_of_texts() -> None:
    raw_body = b'{"entities": [{"id": "a", "features": {"words": ["one", "two"]}}]}'

    assert lookup_body(raw_body, "t", LIMITS).entities[0].features == {"words": ("one", "two")}


@pytest.mark.parametrize(
    ("value", "code", "where"),
    [
        (True, "invalid_feature", ""),
        ([1, True], "invalid_feature", "[1]"),
        ([2**53 + 1], "invalid_feature", ""),
        ("x" * 65_537, "feature_too_long", ""),
        ("é" * 32_769, "feature_too_long", ""),
        (["ok", "x" * 65_537], "feature_too_long", "[1]"),
        (["text", 1], "invalid_feature", "[1]"),
        ([0] * 8_193, "feature_too_long", ""),
        ({"a": 1}, "invalid_feature", ""),
    ],
)
def test_a_feature_no_model_could_take_is_refused(value: object, code: str, where: str) -> None:
    body = {"entities": [{"id": "a", "features": {"x": value}}]}

    assert refused(body) == (422, code, f"entities[0].features.x{where}")


def test_ids_in_a_body_are_strings_or_integers_and_nothing_is_inferred() -> None:
    lookup = lookup_body(b'{"entities": ["007", 7, {"id": "1.0"}, {"id": -3}]}', "t", LIMITS)

    assert [entity.id for entity in lookup.entities] == ["007", "7", "1.0", "-3"]


def test_one_and_one_point_nought_and_true_are_not_the_same_id() -> None:
    # Floats and booleans are refused rather than folded into an integer.
    for value in (b"1.0", b"true", b"null", b"[]", b"123456789012345678901234567890"):
        status, _, field = refused(b'{"entities": [{"id": %b}]}' % value)
        assert status == 422 and field is not None and field.startswith("entities[0]")


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"", "invalid_json", "body"),
        (b"{", "invalid_json", "body"),
        (b'{"entities": [{"id": "a", "features": {"x": NaN}}]}', "invalid_json", "body"),
        (b'{"entities": [{"id": "a", "features": {"x": 1e999}}]}', "invalid_json", "body"),
        (b"[]", "invalid_field", "body"),
        ({}, "missing_field", "entities"),
        ({"entities": {}}, "invalid_field", "entities"),
        ({"entities": []}, "batch_too_long", "entities"),
        ({"entities": ["a"] * 1001}, "batch_too_long", "entities"),
        ({"entities": ["a", ""]}, "invalid_id", "entities[1].id"),
        ({"entities": ["é" * 129]}, "invalid_id", "entities[0].id"),
        ({"entities": [{"id": "a", "histroy": []}]}, "unknown_field", "entities[0].histroy"),
        ({"entities": [{}]}, "missing_field", "entities[0]"),
        ({"entities": [{"history": []}]}, "missing_field", "entities[0]"),
        ({"entities": [{"id": "a", "history": "b"}]}, "invalid_field", "entities[0].history"),
        ({"entities": [{"id": "a", "history": ["b", 1.5]}]}, "invalid_id", "entities[0].history[1]"),
        ({"entities": [{"id": "a", "history": ["b"] * 51}]}, "history_too_long", "entities[0].history"),
        ({"entities": [{"id": "a", "features": [1]}]}, "invalid_field", "entities[0].features"),
        ({"entities": [{"id": "a", "features": {"x": None}}]}, "invalid_feature", "entities[0].features.x"),
        ({"entities": [{"id": "a", "features": {"x": [1, "2"]}}]}, "invalid_feature", "entities[0].features.x[1]"),
        ({"entities": ["a"], "k": 0}, "invalid_k", "k"),
        ({"entities": ["a"], "k": True}, "invalid_k", "k"),
        ({"entities": ["a"], "k": "3"}, "invalid_k", "k"),
        ({"entities": ["a"], "exclude": "b"}, "invalid_field", "exclude"),
        ({"entities": ["a"], "exclude": [None]}, "invalid_id", "exclude[0]"),
        ({"entities": ["a"], "deadline_ms": -1}, "invalid_field", "deadline_ms"),
        ({"entities": ["a"], "deadline_ms": True}, "invalid_field", "deadline_ms"),
        ({"entities": ["a"], "max_age_seconds": "1"}, "invalid_field", "max_age_seconds"),
        ({"entities": ["a"], "fresh": 1}, "invalid_field", "fresh"),
        ({"entities": ["a"], "generation": 5}, "invalid_field", "generation"),
    ],
)  # fmt: skip
def test_a_bad_body_names_code_and_field(body: object, code: str, field: str) -> None:
    assert refused(body) == (422, code, field)


def test_entities_of_several_tables_each_name_theirs() -> None:
    lookup = lookup_body(b'{"entities": [{"table": "a", "id": 1}, {"table": "b", "id": 2}]}', None, LIMITS)

    assert [(entity.table, entity.id) for entity in lookup.entities] == [("a", "1"), ("b", "2")]
    assert refused({"entities": [{"id": "x"}]}, None) == (422, "missing_field", "entities[0].table")
    assert refused({"entities": [{"id": "x", "table": 5}]}, None) == (422, "invalid_field", "entities[0].table")


@pytest.mark.parametrize("entity", [b"1.5", b"null", b"18446744073709551616", b"[]"])
def test_what_is_no_entity_is_told_that_ids_may_stand_there_too(entity: bytes) -> None:
    with pytest.raises(
        Problem, match=r"entities\[0\] is an id .*from -2\*\*63 to 2\*\*64 - 1\) or a JSON object"
    ) as caught:
        lookup_body(b'{"entities": [%b]}' % entity, "t", LIMITS)

    assert caught.value.reason == "invalid_field"


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ({"event": "click"}, "missing_field", "body"),
        ({"event": "click", "canary_key": "k", "generation": "g"}, "invalid_field", "body"),
        ({"event": "click", "canary_key": "k", "generation": None, "arm": "e=a"}, "invalid_field", "body"),
        ({"canary_key": "k"}, "missing_field", "event"),
        ({"canary_key": "k", "event": 5}, "invalid_field", "event"),
    ],
)
def test_feedback_that_lacks_a_field_is_told_from_one_with_a_field_too_many(
    body: dict[str, object], code: str, field: str
) -> None:
    with pytest.raises(Problem) as caught:
        feedback_from_json(body)

    assert (caught.value.reason, caught.value.field) == (code, field)


def test_a_deadline_is_the_tighter_of_body_and_header_and_never_above_the_limit() -> None:
    options = lookup_body(b'{"entities": ["a"], "deadline_ms": 99999}', "t", LIMITS).options

    assert options.deadline_s == 1.0
    assert with_headers(options, [(b"x-deadline-ms", b"50")], LIMITS).deadline_s == 0.05
    assert with_headers(options, [(b"x-deadline-ms", b"5000")], LIMITS).deadline_s == 1.0
    for deadline_header in (b"soon", b"nan", b"-1", b"0", b"1_0", b"--5"):
        with pytest.raises(Problem):
            with_headers(options, [(b"x-deadline-ms", deadline_header)], LIMITS)


def test_what_is_null_counts_as_not_sent() -> None:
    options = ["k", "exclude", "deadline_ms", "fresh", "max_age_seconds", "generation", "canary_key"]
    entity = {"id": "a", "history": None, "features": None}
    body = {"entities": [entity], **dict.fromkeys(options)}
    of_key = {"canary_key": "u", "generation": None, "event": "click", "count": None}

    assert lookup_body(orjson.dumps(body), "t", LIMITS) == lookup_body(b'{"entities": ["a"]}', "t", LIMITS)
    assert feedback_from_json(of_key) == FeedbackReport(None, b"u", None, "click", 1)
    assert refused({"entities": None}) == refused({})


def test_a_score_request_has_a_user_and_candidates() -> None:
    score_request = score_body(b'{"user": {"history": ["a"]}, "items": ["b", 7]}', LIMITS)

    assert score_request.user.history == (b"a",) and score_request.candidate_ids == (b"b", b"7")
    for raw_body, code in (
        (b'{"items": ["a"]}', "missing_field"),
        (b'{"user": "u"}', "missing_field"),
        (b'{"user": "u", "items": "a"}', "invalid_field"),
        (b'{"user": "u", "items": []}', "batch_too_long"),
    ):
        with pytest.raises(Problem) as caught:
            score_body(raw_body, LIMITS)
        assert caught.value.reason == code


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.integers(-(2**63), 2**63) | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.sampled_from(["id", "history", "features", "entities", "k", "x"]),
                                      inner, max_size=4), max_leaves=12))  # fmt: skip
def test_any_json_is_either_parsed_or_refused(value: object) -> None:
    try:
        raw = orjson.dumps(value)
    except (TypeError, orjson.JSONEncodeError):
        return
    for parse in (lambda: lookup_body(raw, "t", LIMITS), lambda: score_body(raw, LIMITS)):
        with contextlib.suppress(Problem):  # and nothing else
            parse()
