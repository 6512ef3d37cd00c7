"""`larder init`: writes `larder.toml` here from a look at a folder's files, and tells what it guessed."""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cache.errors import ConfigError, LarderError
from cache.process.command_line import NOT_WELL, json_text
from cache.process.printable import printable_lines
from infra.cli.init.guesses import Guesses, guess
from infra.cli.init.look import discover_tables
from infra.cli.init.toml_file import text_of
from infra.cli.settings import FILE

_TEXTS = (".txt", ".txt.gz")


def main(argv: Sequence[str], *, prog: str) -> int:
    """Exit code: 0 written, 3 written with something left to fill in; raises ConfigError where nothing was written."""
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
    bundle = _bundle(folder, target.parent)
    part_path = target.with_name(f"{target.name}.part")
    part_path.write_text(text_of(guesses, bundle), encoding="utf-8")
    part_path.replace(target)
    if args.json:
        report = {"file": str(target), "bundle": bundle, **_guesses_to_json(guesses)}
        print(printable_lines(json_text(report)))
    else:
        print(f"{os.path.relpath(target, working_folder)}: written")
        for line in _lines(guesses, bundle):
            print(printable_lines(line))
    return 0 if guesses.is_complete else NOT_WELL


def _first_rows(guesses: Guesses, base: Path) -> list[str]:
    """Notes on what a night would make of the first rows of the interactions."""
    table, columns = guesses.interactions, guesses.columns
    user, item = columns.get("user"), columns.get("item")
    if table is None or not user or not item or not guesses.is_complete:
        return []
    from precompute.config.settings import Sources
    from precompute.sources.first_rows import first_rows_in_words

    sources = Sources(
        (str(table.files[0]),),
        separator=table.separator,
        user_column=user,
        item_column=item,
        timestamp_column=columns.get("timestamp") or "",
        weight_column=columns.get("weight") or "",
    )
    return first_rows_in_words(sources, base)


def _tables_as_text(guesses: Guesses, folder: Path) -> list[str]:
    """Notes on text files that look like a table, if no other interactions were found."""
    if guesses.interactions is not None:
        return []
    from precompute.sources.formats import demand_lines

    notes = []
    for path in sorted(path for path in folder.iterdir() if path.name.lower().endswith(_TEXTS)):
        try:
            demand_lines(path)
        except (LarderError, OSError) as error:
            notes.append(str(error))
    return notes


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write a commented larder.toml from a look at the Parquet and CSV files of a folder: which hold "
        "interactions and features, which columns are users, items, times and weights. Guesses are told here and in "
        "the file. Exit code: 0 written, 3 written with something left for you to fill in, 2 not written.",
    )
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="default: this one"
    )
    parser.add_argument("--output", metavar="FILE", default=FILE, help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="overwrite a file that is there")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser


def _bundle(folder: Path, base: Path) -> str | None:
    """Folder with a model's bundle, at or right below the one that was looked at; relative to `base`."""
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


def _lines(guesses: Guesses, bundle: str | None) -> Iterator[str]:
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
