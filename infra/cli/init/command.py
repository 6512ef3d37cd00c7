"""`larder init`: writes a commented `larder.toml` from an inspection of a folder's files, and reports its guesses."""

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cache.errors import ConfigError, LarderError
from cache.process.command_line import (
    FOUND_PROBLEM_EXIT_CODE,
    json_text,
    printable,
    printable_lines,
)
from infra.cli.commands import SETTINGS_FILE
from infra.cli.init.guesses import Guesses, Role, guess
from infra.cli.init.tables import discover_tables

_OPTIONAL_ROLES: tuple[Role, ...] = ("timestamp", "weight")

_WITHOUT_COLUMN = {
    "timestamp": "none: the order of rows counts",
    "weight": "none: each row is an interaction",
}

_TEXT_FILE_ENDINGS = (".txt", ".txt.gz")
_COMMENT_COLUMN = 44

_TOML_HEAD = """\
# Settings of Larder, written by `larder init`. Paths are relative to this file. All settings, with their
# defaults and bounds: `python -m cache.config.reference`, or docs/reference/configuration.md. The environment goes
# over this file (LARDER_NAMESPACE ...); secrets, such as a Redis URL with a password (REDIS_URL), stand there alone.
"""

_TOML_MIDDLE = """
# namespace = "default"                     # keeps several installations apart in one Redis and one store
# artifacts = ".larder/artifacts"           # the store: a folder, or a URL such as "s3://recs/larder"
# redis_url = "redis://127.0.0.1:6379/0"    # unset: commands start a server of their own, or join `larder redis`
# schedule = "0 3 * * *"                    # when Airflow computes a night, and the service expects one
# timezone = "UTC"
# shards = 4                                # parts that users are scored in; more need less memory
"""

_TOML_END = """
# [tables.user_topk]                        # leave all tables out to build the five default ones
# kind = "user_topk"
# k = 100

# [serving]
# port = 8000
# l1_bytes = 268435456                      # memory for answers, of each worker
"""


def main(argv: Sequence[str], *, prog: str) -> int:
    """Write the file; return exit code 0, or 3 with settings left to fill in; raise ConfigError if none was written."""
    args = argument_parser(prog).parse_args(argv)
    working_folder, target = Path.cwd(), Path(args.output).absolute()
    folder = Path(args.folder).absolute()
    if folder.is_file():
        raise ConfigError(
            f"{args.folder} is a file: name the folder that holds it, such as "
            f"{os.path.relpath(folder.parent, working_folder)}"
        )
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {args.folder}: name the one that holds your files")
    if target.exists() and not args.force:
        raise ConfigError(
            f"{args.output} exists and is not overwritten: move it away, or give --force"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"{args.output}: there is no folder {target.parent}")
    guesses = guess(*discover_tables(folder, target.parent))
    source_notes = _first_rows(guesses, target.parent) or _tables_as_text(guesses, folder)
    guesses.notes += [note.replace(f"{folder}{os.sep}", "") for note in source_notes]
    bundle = _find_bundle(folder, target.parent)
    part_path = target.with_name(f"{target.name}.part")
    part_path.write_text(toml_text(guesses, bundle), encoding="utf-8")
    part_path.replace(target)
    if args.json:
        report = {"file": str(target), "bundle": bundle, **_guesses_to_json(guesses)}
        print(printable_lines(json_text(report)))
    else:
        print(f"{os.path.relpath(target, working_folder)}: written")
        for line in _guess_lines(guesses, bundle):
            print(printable_lines(line))
    return 0 if guesses.is_complete else FOUND_PROBLEM_EXIT_CODE


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write a commented larder.toml from a look at the Parquet and CSV files of a folder: which hold "
        "interactions and features, which columns are users, items, times and weights. Guesses are told here and in "
        "the file. Exit code: 0 written, 3 written with something left for you to fill in, 2 not written.",
    )
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="default: this one"
    )
    parser.add_argument(
        "--output", metavar="FILE", default=SETTINGS_FILE, help="default: %(default)s"
    )
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _first_rows(guesses: Guesses, base: Path) -> list[str]:
    """Return notes on how a night would treat the first rows of the interactions."""
    table, columns = guesses.interactions, guesses.columns
    user, item = columns.get("user"), columns.get("item")
    if table is None or not user or not item or not guesses.is_complete:
        return []
    from precompute.config.settings import Sources
    from precompute.sources.plausibility import first_rows_remarks

    sources = Sources(
        (str(table.files[0]),),
        separator=table.separator,
        user_column=user,
        item_column=item,
        timestamp_column=columns.get("timestamp") or "",
        weight_column=columns.get("weight") or "",
    )
    return first_rows_remarks(sources, base)


def _tables_as_text(guesses: Guesses, folder: Path) -> list[str]:
    """Return notes on text files that look like a table, if no other interactions were found."""
    if guesses.interactions is not None:
        return []
    from precompute.sources.readers import demand_lines_of_ids

    notes = []
    for path in sorted(
        path for path in folder.iterdir() if path.name.lower().endswith(_TEXT_FILE_ENDINGS)
    ):
        try:
            demand_lines_of_ids(path)
        except (LarderError, OSError) as error:
            notes.append(str(error))
    return notes


def _find_bundle(folder: Path, base: Path) -> str | None:
    """Return the folder of a model's bundle, at or directly below the inspected one, relative to `base`, or None."""
    bundle_folder = next(
        (
            manifest_path.parent
            for glob in ("bundle.json", "*/bundle.json")
            for manifest_path in sorted(folder.glob(glob))
        ),
        None,
    )
    return None if bundle_folder is None else Path(os.path.relpath(bundle_folder, base)).as_posix()


def _guesses_to_json(guesses: Guesses) -> dict[str, Any]:
    table = guesses.interactions
    return {
        "interactions": None if table is None else list(table.pattern),
        "columns": guesses.columns,
        "features": {
            entity: feature_table.pattern[0] for entity, feature_table in guesses.features.items()
        },
        "category": guesses.category,
        "notes": guesses.notes,
        "missing": guesses.missing,
    }


def _guess_lines(guesses: Guesses, bundle: str | None) -> Iterator[str]:
    if (table := guesses.interactions) is not None:
        columns_text = ", ".join(
            f"{role} = {name}" for role, name in guesses.columns.items() if name
        )
        yield f"  interactions   {table.title}: {columns_text}"
    for entity, features in guesses.features.items():
        yield f"  {entity}_features  {features.title}"
    if bundle is not None:
        yield f"  bundle         {bundle}"
    yield from (f"  note: {note}" for note in guesses.notes)
    yield from (f"  to do: {missing_setting}" for missing_setting in guesses.missing)
    train = "" if bundle is not None else "larder train, "
    first = "" if guesses.is_complete else "write what is to do into larder.toml; "
    yield f"Next: {first}larder check, then {train}larder night and larder serve."


def toml_text(guesses: Guesses, bundle: str | None) -> str:
    """Return the text of `larder.toml`; a missing setting becomes a comment that says what to write."""
    if bundle is None:
        model = [
            '# bundle = ".larder/bundle"                # made by `larder train`; or the folder of a model of your own'
        ]
    else:
        model = [_toml_line("bundle", bundle, "a model that was found here")]
    lines = [_TOML_HEAD, *model, _TOML_MIDDLE.strip("\n"), "", "[sources]", *_source_lines(guesses)]
    if bundle is None and guesses.items is not None:
        about = (
            f"at most, of the model that `larder train` makes: there are only {guesses.items} items"
        )
        lines += [
            "",
            "[reference]",
            f"{f'dims = {_reference_dims(guesses.items)}':<{_COMMENT_COLUMN}}# {about}",
        ]
    return "\n".join(lines) + "\n" + _TOML_END


def _source_lines(guesses: Guesses) -> Iterator[str]:
    for missing in guesses.missing:
        yield from _comment_lines(f"TO DO: {missing}")
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
        yield _toml_line("separator", table.separator, "between the fields of a row")
    for role in ("user", "item"):
        name = guesses.columns.get(role)
        yield (
            f'# {role}_column = "..."'
            if name is None
            else _toml_line(f"{role}_column", name, f"ids of {role}s")
        )
    for role in _OPTIONAL_ROLES:
        name = guesses.columns.get(role)
        about = {"timestamp": "when it happened", "weight": "0 or less: no interaction"}[role]
        yield _toml_line(f"{role}_column", name or "", about if name else _WITHOUT_COLUMN[role])
    for entity, features in guesses.features.items():
        about = "; items that are not in it are in no list" if entity == "item" else ""
        rows = "" if features.rows is None else f"{features.rows:,} rows, "
        yield _toml_line(
            f"{entity}_features", features.pattern[0], f"{rows}one for each {entity}{about}"
        )
    if guesses.category is not None:
        yield _toml_line(
            "category_column", guesses.category, "of items; the reference model uses it"
        )
    for note in guesses.notes:
        yield from _comment_lines(f"Note: {note}")


def _reference_dims(items: int) -> int:
    """Return the largest power of two of at most a quarter of the items, from 4 to 128."""
    return int(min(128, max(4, 1 << (max(1, items // 4).bit_length() - 1))))


def _toml_line(name: str, value: str, about: str) -> str:
    text = f"{name} = {json.dumps(value, ensure_ascii=False)}"
    return f"{text:<{_COMMENT_COLUMN}}# {about}"


def _comment_lines(text: str) -> Sequence[str]:
    one_line_text = printable(
        " ".join(text.split())
    )  # a name with a line break must not end the comment
    return [
        f"# {comment_line}"
        for comment_line in textwrap.wrap(
            one_line_text, 108, break_long_words=False, break_on_hyphens=False
        )
    ]
