"""Release records: write-once history of publishes, roll backs, refusals and pins."""

import hashlib
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, cast, get_args

import orjson

from cache.errors import CorruptArtefact, UnknownFormat, UnknownGeneration
from cache.format.manifest import GENERATION_PATTERN
from cache.formats import FORMAT_FIELD, POINTER, RELEASE_RECORD, demand_readable, version_of, version_stamp
from cache.store.artefacts import ArtefactStore, generation_path
from cache.store.write_once import pack_files, read_files

Action = Literal[
    "publish", "roll_back", "restore", "canary", "end_canary",
    "refuse", "override", "pin", "unpin", "verify", "abandon", "retire",
]  # fmt: skip
MOVE_ACTIONS: frozenset[str] = frozenset({"publish", "roll_back", "restore"})
"""Actions that make a generation live."""

POINTER_ACTIONS: frozenset[str] = MOVE_ACTIONS | {"canary", "end_canary"}
"""Actions that write the pointer: an intent is written first and completed when the pointer has moved."""

LIST_TRIES = 3
"""Number of times that the records' folder is listed while a record seems to be missing."""

LAST_UNIX_SECOND = 253_402_300_799
"""End of the year 9999 in Unix seconds: datetime supports no later times."""

EPOCHS_END = 2**53
"""Upper bound of epochs: from here on whole numbers are not exact in Lua, which compares epochs."""

# Other files in the folder (notes, an editor's copy) are not records.
_INTENT_FILE_PATTERN = re.compile(r"(0|[1-9][0-9]*)\.json")


@dataclass(frozen=True, slots=True)
class Release:
    """Release record; `number` is its position in the history, from 1 without gaps, so that none is inserted later.

    `epoch` increases with `number`; `at` is Unix seconds. Records of an earlier version have no number and are stored
    under their epoch. A canary: `generation` is the one on trial, `percent` its share, `rule` the feedback event that
    decides, `abandoned` the outcome. An override: `rule` is the gate's name. A retirement: `pages` has the number of
    pages by table, so that pages from an older snapshot of Redis can be removed after the manifest. An intent:
    `expected` is the epoch of the pointer to be replaced.
    """

    epoch: int
    action: Action
    generation: str
    previous: str | None
    attempt: str
    at: float
    reason: str = ""
    manifest_sha256: str = ""
    is_done: bool = False
    expires_at: float | None = None
    percent: float | None = None
    rule: str = ""
    abandoned: bool = False
    pages: Mapping[str, int] | None = None
    expected: int | None = None
    number: int = 0

    @property
    def stored_number(self) -> int:
        """Number under which the record is stored."""
        return self.number or self.epoch

    def to_bytes(self) -> bytes:
        """JSON without `is_done`, which is stored as the existence of a second file."""
        document = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "is_done"}
        document |= version_stamp(RELEASE_RECORD)
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_bytes(cls, release_bytes: bytes, *, is_done: bool) -> Self:
        """Parse the result of `to_bytes`; raise CorruptArtefact for anything else."""
        try:
            record = cls(**_checked_fields(RELEASE_RECORD, release_bytes), is_done=is_done)
            numbers = (record.epoch, record.number)
            if not all(isinstance(number, int) for number in numbers) or not isinstance(record.generation, str):
                raise TypeError("epoch and number must be integers, generation a string")
            if record.action not in get_args(Action):
                raise TypeError(f"there is no action {record.action!r}")
            if not _is_number(record.at, LAST_UNIX_SECOND):
                raise TypeError(f"{record.at!r} is no time in Unix seconds")
        except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
            raise CorruptArtefact(f"not a release record: {error}") from error
        return record


@dataclass(frozen=True, slots=True)
class Canary:
    """Verified generation that answers `percent` of the requests; `since` is Unix seconds.

    `event` is the feedback event that decides; every replica counts it by this name.
    """

    generation: str
    percent: float
    since: float
    event: str = ""


@dataclass(frozen=True, slots=True)
class Pointer:
    """Value of the pointer key; `canary` is set while another generation is on trial."""

    generation: str
    epoch: int
    previous: str | None
    attempt: str
    published_at: float
    canary: Canary | None = None

    def to_bytes(self) -> bytes:
        """JSON as stored in Redis."""
        return orjson.dumps({**asdict(self), **version_stamp(POINTER)})

    @classmethod
    def from_bytes(cls, pointer_bytes: bytes) -> Self:
        """Parse the result of `to_bytes`; raise CorruptArtefact for anything else."""
        try:
            pointer_fields = _checked_fields(POINTER, pointer_bytes)
            pointer = cls(
                **{
                    **pointer_fields,
                    "canary": Canary(**pointer_fields["canary"]) if pointer_fields.get("canary") else None,
                }
            )
            pointer._check()
        except (orjson.JSONDecodeError, TypeError, AttributeError) as error:
            raise CorruptArtefact(f"not a pointer: {error}") from error
        return pointer

    def _check(self) -> None:
        """Raise TypeError for a field of the wrong type, with which replicas would fail at every poll."""
        canary = self.canary
        generations = [self.generation, *filter(None, (self.previous, canary and canary.generation))]
        if not all(
            isinstance(generation, str) and GENERATION_PATTERN.fullmatch(generation) for generation in generations
        ):
            raise TypeError(f"{generations} are not generation ids")
        if type(self.epoch) is not int or not 0 <= self.epoch < EPOCHS_END:
            raise TypeError(f"epoch is {self.epoch!r}, not a whole number below 2**53")
        texts = [self.attempt, *([canary.event] if canary else [])]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{texts} are not texts")
        for unix_seconds in (self.published_at, *([canary.since] if canary else [])):
            if not _is_number(unix_seconds, LAST_UNIX_SECOND):
                raise TypeError(f"{unix_seconds!r} is no time in Unix seconds")
        if canary and not _is_number(canary.percent, 100):
            raise TypeError(f"a canary of {canary.percent!r} percent")


def _checked_fields(format_name: str, document_bytes: bytes) -> dict[str, Any]:
    """Return the fields of a document after checking its version; fields of an unreadable version are not checked."""
    document: dict[str, Any] = orjson.loads(document_bytes)
    demand_readable(format_name, version_of(document))
    return {field: field_value for field, field_value in document.items() if field != FORMAT_FIELD}


def _is_number(field_value: object, number_max: float) -> bool:
    return type(field_value) in (int, float) and 0 <= cast(float, field_value) <= number_max


def manifest_digest(manifest_bytes: bytes) -> str:
    """Return the SHA-256 of a manifest without verdicts and timings, which a verification changes.

    Raises CorruptArtefact for bytes that are not a JSON object.
    """
    try:
        manifest_fields = orjson.loads(manifest_bytes).items()
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise CorruptArtefact(f"not a manifest: {error}") from error
    digested_fields = {name: value for name, value in manifest_fields if name not in ("gates", "timings")}
    return hashlib.sha256(orjson.dumps(digested_fields, option=orjson.OPT_SORT_KEYS)).hexdigest()


def intent_path(release_number: int) -> str:
    """Return the store path of a release record."""
    return f"releases/{release_number}.json"


def done_path(release_number: int) -> str:
    """Return the store path of the file that marks a pointer move as done."""
    return f"releases/{release_number}.done"


def all_releases(
    store: ArtefactStore, release_by_number: MutableMapping[int, Release] | None = None, *, should_pack: bool = False
) -> list[Release]:
    """Read all records, oldest first; records never change, so those in `release_by_number` are not read again.

    `should_pack`: write a pack of records that were read one by one, for later readers; readers without write access
    set it to False. Raises CorruptArtefact, naming the file, for a missing or unreadable record, since the live
    generation would be unknown.
    """
    release_by_number = {} if release_by_number is None else release_by_number
    missing_number = 0
    for _ in range(LIST_TRIES):
        records = _list_releases(store, release_by_number, should_pack=should_pack)
        if not (missing_number := _first_missing_number(records)):
            return records
        # A listing of a growing folder may show the newer of two files without the older one.
    path = intent_path(missing_number)
    raise CorruptArtefact(
        f"{path} in {store.url} is missing, although later records exist: put the file back from a copy of the store",
        path=path,
    )


def _list_releases(
    store: ArtefactStore, release_by_number: MutableMapping[int, Release], *, should_pack: bool
) -> list[Release]:
    file_names = set(store.names("releases"))
    numbers = sorted(
        int(intent_match[1]) for file_name in file_names if (intent_match := _INTENT_FILE_PATTERN.fullmatch(file_name))
    )
    for vanished_number in release_by_number.keys() - set(numbers):  # an older copy of the store may reuse its number
        del release_by_number[vanished_number]
    name_by_number = {number: f"{number}.json" for number in numbers if number not in release_by_number}
    content_by_name, unpacked_names = read_files(store, "releases", file_names, list(name_by_number.values()))
    records: list[Release] = []
    for number in numbers:
        is_done = f"{number}.done" in file_names
        if (record := release_by_number.get(number)) is None:
            release_bytes = content_by_name.get(name_by_number[number])
            if release_bytes is None:
                continue
            epoch = records[-1].epoch if records else 0
            record = _parse_release(store, number, release_bytes, is_done=is_done, previous_epoch=epoch)
        release_by_number[number] = record if record.is_done == is_done else replace(record, is_done=is_done)
        records.append(release_by_number[number])
    if should_pack:
        pack_files(store, "releases", {file_name: content_by_name[file_name] for file_name in unpacked_names})
    return records


def _first_missing_number(records: Sequence[Release]) -> int:
    """Return the number of the first missing record; 0 if none is missing."""
    previous_number = 0
    for record in records:
        if record.number and record.number != previous_number + 1:
            return record.number - 1
        previous_number = record.stored_number
    return 0


def _parse_release(
    store: ArtefactStore, release_number: int, release_bytes: bytes, *, is_done: bool, previous_epoch: int
) -> Release:
    try:
        record = Release.from_bytes(release_bytes, is_done=is_done)
        if record.stored_number != release_number:
            raise CorruptArtefact(f"the record {record.stored_number} is stored under another number")
        if record.epoch <= previous_epoch:
            raise CorruptArtefact(f"its epoch {record.epoch} is not above that of the record before, {previous_epoch}")
    except UnknownFormat as error:
        raise UnknownFormat(f"{intent_path(release_number)} in {store.url}: {error.message}") from error
    except CorruptArtefact as error:
        path = intent_path(release_number)
        raise CorruptArtefact(
            f"{path} in {store.url} cannot be read ({error.message}): put the file back from a copy of the store; "
            "if it never was a release record, move it aside",
            path=path,
        ) from error
    return record


def newest_release(store: ArtefactStore) -> Release | None:
    """Return the newest completed move of the pointer, which replicas follow at their start if Redis is unavailable."""
    return newest_move(all_releases(store))


def newest_move(releases: Sequence[Release]) -> Release | None:
    """Return the last completed publish, roll back or restore among ordered records."""
    return next((release for release in reversed(releases) if release.action in MOVE_ACTIONS and release.is_done), None)


def publication_time(releases: Sequence[Release], generation: str) -> float | None:
    """Return the time in Unix seconds at which the generation last became live; a restore does not count."""
    return max(
        (
            release.at
            for release in releases
            if release.generation == generation and release.is_done and release.action in ("publish", "roll_back")
        ),
        default=None,
    )


def released_manifest_digest(releases: Sequence[Release], generation: str) -> str:
    """Return the manifest's digest as last published or verified again; empty if no record has one."""
    return next(
        (
            release.manifest_sha256
            for release in reversed(releases)
            if release.generation == generation
            and release.manifest_sha256
            and (release.action == "verify" or (release.action == "publish" and release.is_done))
        ),
        "",
    )


def demand_released_manifest(store: ArtefactStore, generation: str, releases: Sequence[Release]) -> None:
    """Raise CorruptArtefact if the manifest differs from the released one, UnknownGeneration if it is missing."""
    raw_manifest = store.read(generation_path(generation, "manifest.json"))
    if raw_manifest is None:
        raise UnknownGeneration(f"generation {generation} has no manifest in {store.url}", generation=generation)
    released_digest, stored_digest = released_manifest_digest(releases, generation), manifest_digest(raw_manifest)
    if released_digest and released_digest != stored_digest:
        raise CorruptArtefact(
            f"the manifest of {generation} has the digest {stored_digest}, but its release record has "
            f"{released_digest}",
            generation=generation,
        )
