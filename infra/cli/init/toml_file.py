"""Text of a commented `larder.toml`. Pure."""

import json
import textwrap
from collections.abc import Iterator, Sequence

from cache.process.printable import printable
from infra.cli.init.guesses import Guesses
from infra.cli.init.roles import Role

_OPTIONAL: tuple[Role, ...] = ("timestamp", "weight")
_WITHOUT = {
    "timestamp": "none: the order of rows counts",
    "weight": "none: each row is an interaction",
}
_COLUMN = 44

_HEAD = """\
# Settings of Larder, written by `larder init`. Paths are relative to this file. All settings, with their
# defaults and bounds: `python -m cache.config.reference`, or docs/reference/configuration.md. The environment goes
# over this file (LARDER_NAMESPACE ...); secrets, such as a Redis URL with a password (REDIS_URL), stand there alone.
"""
_MIDDLE = """
# namespace = "default"                     # keeps several installations apart in one Redis and one store
# artifacts = ".larder/artifacts"           # the store: a folder, or a URL such as "s3://recs/larder"
# redis_url = "redis://127.0.0.1:6379/0"    # unset: commands start a server of their own, or join `larder redis`
# schedule = "0 3 * * *"                    # when Airflow computes a night, and the service expects one
# timezone = "UTC"
# shards = 4                                # parts that users are scored in; more need less memory
"""
_END = """
# [tables.user_topk]                        # leave all tables out to build the five default ones
# kind = "user_topk"
# k = 100

# [serving]
# port = 8000
# l1_bytes = 268435456                      # memory for answers, of each worker
"""


def text_of(guesses: Guesses, bundle: str | None) -> str:
    """The file; what could not be guessed stands in it as a comment that says what to write."""
    if bundle is None:
        model = [
            '# bundle = ".larder/bundle"                # made by `larder train`; or the folder of a model of your own'
        ]
    else:
        model = [_line("bundle", bundle, "a model that was found here")]
    lines = [_HEAD, *model, _MIDDLE.strip("\n"), "", "[sources]", *_sources(guesses)]
    if bundle is None and guesses.items is not None:
        about = (
            f"at most, of the model that `larder train` makes: there are only {guesses.items} items"
        )
        lines += ["", "[reference]", f"{f'dims = {_dims(guesses.items)}':<{_COLUMN}}# {about}"]
    return "\n".join(lines) + "\n" + _END


def _sources(guesses: Guesses) -> Iterator[str]:
    for missing in guesses.missing:
        yield from _comment(f"TO DO: {missing}")
    table = guesses.interactions
    if table is None:
        yield "interactions = []"
        return
    rows = f"{table.format}, {table.size_bytes:,} bytes" + (
        "" if table.rows is None else f", {table.rows:,} rows"
    )
    columns = printable(", ".join(table.columns))
    yield f"# {len(table.files)} file{'s' * (len(table.files) > 1)}, {rows}; columns: {columns}"
    yield f"interactions = {json.dumps(list(table.pattern), ensure_ascii=False)}"
    if table.separator != ",":
        yield _line("separator", table.separator, "between the fields of a row")
    for role in ("user", "item"):
        name = guesses.columns.get(role)
        yield (
            f'# {role}_column = "..."'
            if name is None
            else _line(f"{role}_column", name, f"ids of {role}s")
        )
    for role in _OPTIONAL:
        name = guesses.columns.get(role)
        about = {"timestamp": "when it happened", "weight": "0 or less: no interaction"}[role]
        yield _line(f"{role}_column", name or "", about if name else _WITHOUT[role])
    for entity, features in guesses.features.items():
        about = "; items that are not in it are in no list" if entity == "item" else ""
        rows = "" if features.rows is None else f"{features.rows:,} rows, "
        yield _line(
            f"{entity}_features", features.pattern[0], f"{rows}one for each {entity}{about}"
        )
    if guesses.category is not None:
        yield _line("category_column", guesses.category, "of items; the reference model uses it")
    for note in guesses.notes:
        yield from _comment(f"Note: {note}")


def _dims(items: int) -> int:
    """Largest power of two of at most a quarter of the items, from 4 to 128."""
    return int(min(128, max(4, 1 << (max(1, items // 4).bit_length() - 1))))


def _line(name: str, value: str, about: str) -> str:
    text = f"{name} = {json.dumps(value, ensure_ascii=False)}"
    return f"{text:<{_COLUMN}}# {about}"


def _comment(text: str) -> Sequence[str]:
    one_line_text = printable(
        " ".join(text.split())
    )  # a name with a line break must not end the comment
    return [
        f"# {comment_line}"
        for comment_line in textwrap.wrap(
            one_line_text, 108, break_long_words=False, break_on_hyphens=False
        )
    ]
