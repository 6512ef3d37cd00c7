"""Fields and sources of an answer, each declared once: name, type, when it is present, and meaning. Pure.

A field is declared in `Origin` (for all answers), in `Answer` (for tables of one kind) or in `Ranking`. Renderers, JSON
schema and reference page use these declarations; the client returns the same classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from serving.arrow.schema import ColumnKind, Field

Numbers = NDArray[np.float32]
ProducedBy = Literal["batch", "live", "defaults"]

PresenceCondition = Literal["always", "told", "topk", "vector", "value"]
"""Which answers have a field: all; those with a value for it; or those of one kind of tables."""

WHEN_SET: PresenceCondition = "told"

_NO_NUMBERS = np.zeros(0, np.float32)
_NO_NUMBERS.setflags(write=False)

_JSON_NAME_BY_TYPE = {str: "string", float: "number", int: "integer", bool: "boolean"}
_ARROW_KIND_BY_TYPE: Mapping[Any, ColumnKind] = {str: "utf8", float: "f8", int: "i4", bool: "bool"}
_ARROW_NAME_BY_KIND = {"utf8": "utf8", "f8": "float64", "f4": "float32", "i4": "int32", "bool": "bool"}


class Source(StrEnum):
    """Source of an answer, in the order of the ladder: tiers, live inference, previous generation, defaults."""

    L1 = "l1"
    L2 = "l2"
    LIVE = "live"
    PREVIOUS = "previous"
    DEFAULT = "default"


STORED_SOURCES = (Source.L1, Source.L2)
"""Sources that hold records of the live generation, ready to be read."""

FALLBACK_SOURCES = tuple([source for source in Source if source not in (*STORED_SOURCES, Source.LIVE)])
"""Sources that answer when the live generation cannot."""


class FieldDeclaration(NamedTuple):
    """Declaration of a field besides name and type; a field that is absent in JSON is null in Arrow."""

    meaning: str
    present_when: PresenceCondition = "always"
    is_nullable: bool = False
    schema_format: str | None = None


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """Origin of an answer: its table, source and generation, and reasons for anything unusual."""

    id: Annotated[str | None, FieldDeclaration("Requested id; null: only an input was sent", is_nullable=True)]
    table: Annotated[str, FieldDeclaration("Requested table")]
    source: Annotated[Source, FieldDeclaration("Rung of the ladder that answered")]
    producer: Annotated[
        ProducedBy | None, FieldDeclaration("What computed the answer; null: nothing did", is_nullable=True)
    ] = None
    generation: Annotated[str, FieldDeclaration("Generation that the whole answer is from")]
    age_seconds: Annotated[float, FieldDeclaration("Now minus the generation's data_until")]
    published_at: Annotated[str, FieldDeclaration("Time of publication, RFC 3339, UTC", schema_format="date-time")]
    reason: Annotated[str | None, FieldDeclaration("Why this is not a plain hit", WHEN_SET)] = None
    live: Annotated[str | None, FieldDeclaration("Why live did not answer, though there was an input", WHEN_SET)] = None
    dropped_history: Annotated[int, FieldDeclaration("History ids the model does not know", WHEN_SET)] = 0
    reranked: Annotated[
        str | None, FieldDeclaration("What changed the order: `boost`, `diversify` or both, with `+`", WHEN_SET)
    ] = None
    near: Annotated[
        float | None,
        FieldDeclaration("Distance of the input whose live answer this reuses, in lengths of its vector", WHEN_SET),
    ] = None
    events: Annotated[
        int, FieldDeclaration("Number of the user's counted events that are newer than the generation", WHEN_SET)
    ] = 0
    as_of: Annotated[
        str | None,
        FieldDeclaration(
            "Time when the newest of these events was accepted, RFC 3339, UTC", WHEN_SET, schema_format="date-time"
        ),
    ] = None
    approximate: Annotated[
        bool,
        FieldDeclaration(
            "May differ from a night's answer with these events: found by the index, or stored earlier", WHEN_SET
        ),
    ] = False
    stale: Annotated[str | None, FieldDeclaration("Why this replica may lag behind", WHEN_SET)] = None
    experiment: Annotated[str | None, FieldDeclaration("Experiment that the request's key is in", WHEN_SET)] = None
    arm: Annotated[str | None, FieldDeclaration("Arm of the experiment that answered", WHEN_SET)] = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer(Origin):
    """Answer for one entity; the table's kind decides which of items with scores, vector or values is set."""

    items: Annotated[tuple[str, ...] | None, FieldDeclaration("Item ids, best first", "topk")] = None
    scores: Annotated[Numbers | None, FieldDeclaration("Scores of the items", "topk")] = None
    short: Annotated[bool, FieldDeclaration("Fewer than k remain; under a filter: fewer than k pass", "topk")] = False
    vector: Annotated[
        Numbers | None, FieldDeclaration("Embedding; null: none", "vector", is_nullable=True)
    ] = None
    values: Annotated[
        Numbers | None, FieldDeclaration("Model outputs; null: none", "value", is_nullable=True)
    ] = None
    labels: Annotated[tuple[str, ...] | None, FieldDeclaration("Names of the values", "value")] = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranking(Origin):
    """Ranking: candidates of one user in rank order, and those that could not be ranked."""

    items: Annotated[tuple[str, ...], FieldDeclaration("Candidates, best first")] = ()
    scores: Annotated[Numbers, FieldDeclaration("Scores of the candidates")] = field(
        default_factory=lambda: _NO_NUMBERS
    )
    score_tolerance: Annotated[
        float | None,
        FieldDeclaration(
            "Largest error of scores, relative to the largest vector component; 0: float32",
            WHEN_SET),
    ] = None
    unknown: Annotated[tuple[str, ...], FieldDeclaration("Candidates that the generation does not have")] = ()
    blocked: Annotated[tuple[str, ...], FieldDeclaration("Candidates on the blocklist")] = ()
    excluded: Annotated[tuple[str, ...], FieldDeclaration("Candidates in the sent history")] = ()
    filtered: Annotated[tuple[str, ...], FieldDeclaration("Candidates that do not pass the filter", WHEN_SET)] = ()
    unscored: Annotated[
        tuple[str, ...], FieldDeclaration(
            "Candidates without a score: the user has no vector",
            WHEN_SET)
    ] = ()


# fmt: on


@dataclass(frozen=True, slots=True)
class AnswerField:
    """Declared field; `field_type` is the type of its values that are not null."""

    name: str
    field_type: Any
    declaration: FieldDeclaration

    @property
    def json_key_bytes(self) -> bytes:
        """JSON key of the field, preceded by a comma."""
        return b',"%b":' % self.name.encode()

    @property
    def arrow_field(self) -> Field:
        """Return the Arrow column; a list of numbers may have the fixed width of its table."""
        is_nullable = self.declaration.is_nullable or self.declaration.present_when == WHEN_SET
        if self.field_type is Numbers or get_origin(self.field_type) is tuple:
            child = Field("item", "f4" if self.field_type is Numbers else "utf8")
            return Field(self.name, "list", is_nullable, child)
        return Field(self.name, _ARROW_KIND_BY_TYPE.get(self.field_type, "utf8"), is_nullable)

    @property
    def arrow_type_name(self) -> str:
        """Return the name of the Arrow type."""
        arrow_column = self.arrow_field
        if arrow_column.child is None:
            return _ARROW_NAME_BY_KIND[arrow_column.kind]
        has_table_width = self.declaration.present_when in ("vector", "value") and self.field_type is Numbers
        return f"{'fixed_size_' * has_table_width}list<{_ARROW_NAME_BY_KIND[arrow_column.child.kind]}>"

    @property
    def json_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the value."""
        field_schema: dict[str, Any] = {"description": self.declaration.meaning}
        if self.declaration.schema_format is not None:
            field_schema["format"] = self.declaration.schema_format
        allowed_values = list(Source) if self.field_type is Source else get_args(self.field_type)
        if allowed_values and get_origin(self.field_type) is not tuple and self.field_type is not Numbers:
            return field_schema | {"enum": [*map(str, allowed_values), *[None] * self.declaration.is_nullable]}
        json_type = _JSON_NAME_BY_TYPE.get(self.field_type, "array")
        if json_type == "array":
            field_schema["items"] = {"type": "number" if self.field_type is Numbers else "string"}
        return field_schema | {"type": [json_type, "null"] if self.declaration.is_nullable else json_type}


def declared_fields(answer_class: type[Origin]) -> tuple[AnswerField, ...]:
    """Return the fields of a class, in order."""
    answer_fields = []
    for field_name, annotation in get_type_hints(answer_class, include_extras=True).items():
        annotated_type, declaration = get_args(annotation)
        union_members = (
            get_args(annotated_type)
            if isinstance(annotated_type, UnionType) or get_origin(annotated_type) is Union
            else (annotated_type,)
        )
        answer_fields.append(
            AnswerField(
                field_name,
                next(member_type for member_type in union_members if member_type is not type(None)),
                declaration,
            )
        )
    return tuple(answer_fields)


ORIGIN_FIELDS = declared_fields(Origin)[2:]
"""Fields of an answer after its id, its table and its prediction."""

PREDICTION_FIELDS_BY_KIND: Mapping[str, tuple[AnswerField, ...]] = {
    kind: tuple(
        [answer_field for answer_field in declared_fields(Answer) if answer_field.declaration.present_when == kind]
    )
    for kind in ("topk", "vector", "value")
}
"""Fields of a prediction, by the kind of the table."""
