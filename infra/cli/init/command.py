"""`larder init`: inspects a folder's files, writes a commented `larder.toml`, and reports its guesses."""

import argparse
import json
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cache.errors import ConfigError, LarderError
from cache.process.command_line import FOUND_PROBLEM_EXIT_CODE, json_text, printable, printable_lines
from infra.cli.commands import SETTINGS_FILE
from infra.cli.init.guesses import Guesses, Role, guess_settings
from infra.cli.init.tables import discover_tables

_OPTIONAL_ROLES: tuple[Role, ...] = ("timestamp", "weight")

_NO_COLUMN_TEXT_BY_ROLE = {"timestamp": "none: the order of rows is used", "weight": "none: each row is an interaction"}

_TEXT_FILE_ENDINGS = (".txt", ".txt.gz")
_COMMENT_COLUMN = 44

_TOML_HEAD_TEXT = """\
# Settings of Larder, written by `larder init`. Paths are relative to this file. All settings, with their
# defaults and bounds: `python -m cache.config.reference`, or docs/reference/configuration.md. Environment
# variables (LARDER_NAMESPACE ...) override this file; put secrets, such as a Redis URL with a password (REDIS_URL),
# only into the environment.
"""

_TOML_MIDDLE_TEXT = """
# namespace = "default"                     # keeps several installations apart in one Redis and one store
# artifacts = ".larder/artifacts"           # the store: a folder, or a URL such as "s3://recs/larder"
# redis_url = "redis://127.0.0.1:6379/0"    # if unset, commands start their own server, or use `larder redis`
# schedule = "0 3 * * *"                    # when Airflow computes a night, and the service expects one
# timezone = "UTC"
# shards = 4                                # parts in which users are scored; more shards need less memory
"""

_TOML_END_TEXT = """
# [tables.user_topk]                        # without any table here, the five default ones are built
# kind = "user_topk"
# k = 100

# [serving]
# port = 8000
# l1_bytes = 268435456                      # bytes of memory for answers, in each worker
"""


def main(argv: Sequence[str], *, prog: str) -> int:
    """Write the file; return 0, or 3 if settings are left to fill in; raise ConfigError if no file was written."""
    args = argument_parser(prog).parse_args(argv)
    working_folder, target_path = Path.cwd(), Path(args.output).absolute()
    tables_folder = Path(args.folder).absolute()
    if tables_folder.is_file():
        raise ConfigError(
            f"{args.folder} is a file: name the folder that holds it, such as "
            f"{os.path.relpath(tables_folder.parent, working_folder)}"
        )
    if not tables_folder.is_dir():
        raise ConfigError(f"there is no folder {args.folder}: name the folder that holds your files")
    if target_path.exists() and not args.force:
        raise ConfigError(f"{args.output} exists and is not overwritten: move it away, or give --force")
    if not target_path.parent.is_dir():
        raise ConfigError(f"{args.output}: there is no folder {target_path.parent}")
    setting_guesses = guess_settings(*discover_tables(tables_folder, target_path.parent))
    source_notes = _notes_on_first_rows(setting_guesses, target_path.parent) or _notes_on_text_files(
        setting_guesses, tables_folder
    )
    setting_guesses.guess_notes += [note.replace(f"{tables_folder}{os.sep}", "") for note in source_notes]
    bundle_path = _find_bundle(tables_folder, target_path.parent)
    part_path = target_path.with_name(f"{target_path.name}.part")
    part_path.write_text(toml_text(setting_guesses, bundle_path), encoding="utf-8")
    part_path.replace(target_path)
    if args.json:
        report = {"file": str(target_path), "bundle": bundle_path, **_guesses_to_json(setting_guesses)}
        print(printable_lines(json_text(report)))
    else:
        print(f"{os.path.relpath(target_path, working_folder)}: written")
        for line in _guess_lines(setting_guesses, bundle_path):
            print(printable_lines(line))
    from precompute.sources.plausibility import REFUSAL_PREFIX

    is_refused = any(note.startswith(REFUSAL_PREFIX) for note in source_notes)
    return 0 if setting_guesses.is_complete and not is_refused else FOUND_PROBLEM_EXIT_CODE


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Inspect the Parquet and CSV files of a folder and write a commented larder.toml. It guesses which "
        "files hold interactions and features, and which columns are users, items, times and weights; the guesses are "
        "printed and written as comments. Exit code: 0 written, 3 written with settings left to fill in, or for "
        "interactions that a night refuses, 2 not written.",
    )
    parser.add_argument(
        "folder", nargs="?", default=".", metavar="FOLDER", help="folder to inspect (default: the current one)"
    )
    parser.add_argument("--output", metavar="FILE", default=SETTINGS_FILE, help="file to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--json", action="store_true", help="print the guesses as JSON")
    return parser


def _notes_on_first_rows(setting_guesses: Guesses, base_folder: Path) -> list[str]:
    """Return notes on how a night would treat the first rows of the interactions."""
    interactions_table, column_by_role = setting_guesses.interactions, setting_guesses.column_by_role
    user_column, item_column = column_by_role.get("user"), column_by_role.get("item")
    if interactions_table is None or not user_column or not item_column or not setting_guesses.is_complete:
        return []
    from precompute.config.settings import Sources
    from precompute.sources.plausibility import first_rows_remarks

    sources = Sources(
        (str(interactions_table.file_paths[0]),),
        separator=interactions_table.field_separator,
        user_column=user_column,
        item_column=item_column,
        timestamp_column=column_by_role.get("timestamp") or "",
        weight_column=column_by_role.get("weight") or "",
    )
    return first_rows_remarks(sources, base_folder)


def _notes_on_text_files(setting_guesses: Guesses, folder: Path) -> list[str]:
    """Return notes on text files that look like a table, if no other interactions were found."""
    if setting_guesses.interactions is not None:
        return []
    from precompute.sources.readers import demand_lines_of_ids

    text_file_notes = []
    for text_file in sorted(
        text_file for text_file in folder.iterdir() if text_file.name.lower().endswith(_TEXT_FILE_ENDINGS)
    ):
        try:
            demand_lines_of_ids(text_file)
        except (LarderError, OSError) as error:
            text_file_notes.append(str(error))
    return text_file_notes


def _find_bundle(folder: Path, base_folder: Path) -> str | None:
    """Return the path, relative to `base_folder`, of a bundle in the folder or directly below it; None without one."""
    bundle_folder = next(
        (
            manifest_path.parent
            for manifest_pattern in ("bundle.json", "*/bundle.json")
            for manifest_path in sorted(folder.glob(manifest_pattern))
        ),
        None,
    )
    return None if bundle_folder is None else Path(os.path.relpath(bundle_folder, base_folder)).as_posix()


def _guesses_to_json(setting_guesses: Guesses) -> dict[str, Any]:
    interactions_table = setting_guesses.interactions
    return {
        "interactions": None if interactions_table is None else list(interactions_table.pattern_parts),
        "columns": setting_guesses.column_by_role,
        "features": {
            entity: feature_table.pattern_parts[0]
            for entity, feature_table in setting_guesses.feature_table_by_entity.items()
        },
        "category": setting_guesses.category_column,
        "notes": setting_guesses.guess_notes,
        "missing": setting_guesses.missing_setting_lines,
    }


def _guess_lines(setting_guesses: Guesses, bundle_path: str | None) -> Iterator[str]:
    if (interactions_table := setting_guesses.interactions) is not None:
        columns_text = ", ".join(
            f"{role} = {column_name}" for role, column_name in setting_guesses.column_by_role.items() if column_name
        )
        yield f"  interactions   {interactions_table.title}: {columns_text}"
    for entity, feature_table in setting_guesses.feature_table_by_entity.items():
        yield f"  {entity}_features  {feature_table.title}"
    if bundle_path is not None:
        yield f"  bundle         {bundle_path}"
    yield from (f"  note: {note}" for note in setting_guesses.guess_notes)
    yield from (f"  to do: {missing_setting}" for missing_setting in setting_guesses.missing_setting_lines)
    train_step = "" if bundle_path is not None else "larder train, "
    first_step = "" if setting_guesses.is_complete else "fill in the settings to do in larder.toml; "
    yield f"Next: {first_step}larder check, then {train_step}larder night and larder serve."


def toml_text(setting_guesses: Guesses, bundle_path: str | None) -> str:
    """Return the text of `larder.toml`; a missing setting becomes a comment that says what to write."""
    if bundle_path is None:
        bundle_lines = [
            '# bundle = ".larder/bundle"                # made by `larder train`; or the folder of your own model'
        ]
    else:
        bundle_lines = [_toml_line("bundle", bundle_path, "a model that was found there")]
    toml_lines = [
        _TOML_HEAD_TEXT,
        *bundle_lines,
        _TOML_MIDDLE_TEXT.strip("\n"),
        "",
        "[sources]",
        *_source_lines(setting_guesses),
    ]
    if bundle_path is None and setting_guesses.item_count_if_few is not None:
        comment = f"maximum for the model of `larder train`: there are only {setting_guesses.item_count_if_few} items"
        toml_lines += [
            "",
            "[reference]",
            f"{f'dims = {_reference_dims(setting_guesses.item_count_if_few)}':<{_COMMENT_COLUMN}}# {comment}",
        ]
    return "\n".join(toml_lines) + "\n" + _TOML_END_TEXT


def _source_lines(setting_guesses: Guesses) -> Iterator[str]:
    for missing_setting in setting_guesses.missing_setting_lines:
        yield from _comment_lines(f"TO DO: {missing_setting}")
    interactions_table = setting_guesses.interactions
    if interactions_table is None:
        yield "interactions = []"
        return
    size_text = f"{interactions_table.file_format}, {interactions_table.size_bytes:,} bytes" + (
        "" if interactions_table.row_count is None else f", {interactions_table.row_count:,} rows"
    )
    columns_text = printable(", ".join(interactions_table.kind_by_column))
    yield (
        f"# {len(interactions_table.file_paths)} file{'s' * (len(interactions_table.file_paths) > 1)}, {size_text}; "
        f"columns: {columns_text}"
    )
    yield f"interactions = {json.dumps(list(interactions_table.pattern_parts), ensure_ascii=False)}"
    if interactions_table.field_separator != ",":
        yield _toml_line("separator", interactions_table.field_separator, "between the fields of a row")
    for role in ("user", "item"):
        column_name = setting_guesses.column_by_role.get(role)
        yield (
            f'# {role}_column = "..."'
            if column_name is None
            else _toml_line(f"{role}_column", column_name, f"ids of {role}s")
        )
    for role in _OPTIONAL_ROLES:
        column_name = setting_guesses.column_by_role.get(role)
        comment = {"timestamp": "time of the interaction", "weight": "0 or less: no interaction"}[role]
        yield _toml_line(f"{role}_column", column_name or "", comment if column_name else _NO_COLUMN_TEXT_BY_ROLE[role])
    for entity, feature_table in setting_guesses.feature_table_by_entity.items():
        comment = "; other items are never recommended" if entity == "item" else ""
        size_text = "" if feature_table.row_count is None else f"{feature_table.row_count:,} rows, "
        yield _toml_line(
            f"{entity}_features", feature_table.pattern_parts[0], f"{size_text}one for each {entity}{comment}"
        )
    if setting_guesses.category_column is not None:
        yield _toml_line(
            "category_column", setting_guesses.category_column, "category of items, for the reference model"
        )
    for note in setting_guesses.guess_notes:
        yield from _comment_lines(f"Note: {note}")


def _reference_dims(item_count: int) -> int:
    """Return the largest power of two up to a quarter of the number of items, bounded to 4 to 128."""
    return int(min(128, max(4, 1 << (max(1, item_count // 4).bit_length() - 1))))


def _toml_line(setting_name: str, setting_value: str, comment_text: str) -> str:
    assignment = f"{setting_name} = {json.dumps(setting_value, ensure_ascii=False)}"
    return f"{assignment:<{_COMMENT_COLUMN}}# {comment_text}"


def _comment_lines(comment_text: str) -> Sequence[str]:
    one_line_text = printable(" ".join(comment_text.split()))  # a line break in a name would end the comment
    return [
        f"# {comment_line}"
        for comment_line in textwrap.wrap(one_line_text, 108, break_long_words=False, break_on_hyphens=False)
    ]
