"""`larder import`: makes a folder that a night can read from a model that another library fitted."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cache.errors import SourceError
from cache.process.command_line import json_text, printable_lines

_SETTING_NAMES = ("user_column", "item_column", "timestamp_column", "id_column")

if TYPE_CHECKING:
    from precompute.adapters.classifiers import ClassifierReport
    from precompute.adapters.folder import ImportReport


def main(argv: Sequence[str], *, prog: str) -> int:
    """Run the import; return exit code 0; raise SourceError or ConfigError if no folder was written."""
    args = argument_parser(prog).parse_args(argv)
    from precompute.config.console import err_console, progress_bars

    with progress_bars(err_console, is_quiet=args.json) as progress:
        progress("import", 0, 0)
        try:
            report = _IMPORT_BY_KIND[args.kind](args)
        except SourceError as error:
            raise _error_with_option_names(error) from error
    report_text = json_text(report.to_json()) if args.json else "\n".join(report.lines())
    print(printable_lines(report_text))
    return 0


def _error_with_option_names(error: SourceError) -> SourceError:
    """Return the error with option names of this command in place of setting names."""
    message = error.message
    for setting_name in _SETTING_NAMES:
        message = message.replace(f"name it by {setting_name}", f"name it by --{setting_name.replace('_', '-')}")
    return SourceError(message, **error.details)


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Make a folder with a bundle, larder.toml and all other files that a night reads, from a model "
        "that another library fitted. From Python: precompute.adapters. Exit code: 0 written, 2 refused and nothing "
        "written.",
    )
    kind_parsers = parser.add_subparsers(required=True, metavar="KIND", dest="kind")
    vectors_parser = kind_parsers.add_parser(
        "vectors",
        help="vectors of items and, optionally, of users",
        description="Import vectors from a Parquet file with a column of ids and a column of number lists, or from a "
        ".npy file.",
    )
    vectors_parser.add_argument("--items", required=True, metavar="FILE", help="vectors of items")
    vectors_parser.add_argument("--users", metavar="FILE", help="vectors of users")
    vectors_parser.add_argument(
        "--metric", choices=["inner_product", "cosine"], default="inner_product", help="default: %(default)s"
    )  # fmt: skip
    implicit_parser = kind_parsers.add_parser(
        "implicit",
        help="an ALS, BPR or LMF model of the library implicit",
        description="Import the .npz file that the model's `save` writes; implicit need not be installed.",
    )
    implicit_parser.add_argument("model", metavar="FILE", help=".npz file that `model.save` wrote")
    classifier_parser = kind_parsers.add_parser(
        "classifier",
        help="a classifier or regressor as ONNX: XGBoost, LightGBM, scikit-learn",
        description="Import a model from an ONNX file, with a table that has one row for each id to score.",
    )
    classifier_parser.add_argument("model", metavar="FILE", help="ONNX file of the model")
    classifier_parser.add_argument(
        "--features", required=True, metavar="FILE", help="Parquet or CSV file with one row for each id"
    )
    classifier_parser.add_argument(
        "--labels", required=True, metavar="A,B", help="names of the model's output values, in their order"
    )  # fmt: skip
    classifier_parser.add_argument(
        "--id-column", default="user", metavar="NAME", help="column with the ids, default: %(default)s"
    )
    classifier_parser.add_argument(
        "--columns", metavar="A,B", help="feature columns for a model with one input, in order; default: all others"
    )  # fmt: skip
    classifier_parser.add_argument(
        "--table", default="prediction", metavar="NAME", help="name of the table in requests, default: %(default)s"
    )
    classifier_parser.add_argument("--output", metavar="NAME", help="output of the model to use, if it has several")
    classifier_parser.add_argument(
        "--expected",
        metavar="FILE",
        help=".npy file of the library's predictions per row, to compare the ONNX model with",
    )
    for kind_parser in (vectors_parser, implicit_parser, classifier_parser):
        kind_parser.add_argument("--to", required=True, metavar="FOLDER", help="folder to write")
        kind_parser.add_argument("--json", action="store_true", help="print the report as JSON")
    for kind_parser in (vectors_parser, implicit_parser):
        kind_parser.add_argument(
            "--clicks", required=kind_parser is implicit_parser, metavar="FILE",
            help="interactions: user,item in Parquet or CSV, or a scipy matrix [users, items] in .npz",
        )  # fmt: skip
        for entity_kind in ("user", "item"):
            help_text = f"column of {entity_kind} ids in a table of clicks, default: %(default)s"
            kind_parser.add_argument(f"--{entity_kind}-column", default=entity_kind, metavar="NAME", help=help_text)
        kind_parser.add_argument(
            "--timestamp-column", default="timestamp", metavar="NAME",
            help="column of times, by which clicks are sorted, default: %(default)s",
        )  # fmt: skip
        kind_parser.add_argument(
            "--item-ids", metavar="FILE", help="text file of item ids, one a line, in the order of the rows"
        )
        kind_parser.add_argument(
            "--user-ids", metavar="FILE", help="text file of user ids, one a line, in the order of the rows"
        )
    return parser


def _click_source(args: argparse.Namespace) -> Any:
    """Return the value of `--clicks`: the path of a matrix, or `Sources` with the table's columns, or None."""
    if args.clicks is None or args.clicks.endswith(".npz"):
        return args.clicks
    from cache.config.night import Sources

    return Sources(
        interactions=(args.clicks,),
        user_column=args.user_column,
        item_column=args.item_column,
        timestamp_column=args.timestamp_column,
    )


def _import_vectors(args: argparse.Namespace) -> "ImportReport":
    from precompute.adapters.vectors import from_vectors

    return from_vectors(
        args.item_ids, args.items, args.user_ids, args.users, to=args.to, clicks=_click_source(args), metric=args.metric
    )  # fmt: skip


def _import_implicit(args: argparse.Namespace) -> "ImportReport":
    from precompute.adapters.factorisations import from_implicit

    return from_implicit(args.model, _click_source(args), to=args.to, user_ids=args.user_ids, item_ids=args.item_ids)


def _split_names(comma_list: str) -> list[str]:
    """Split at commas and strip blanks around the names."""
    return [name.strip() for name in comma_list.split(",")]


def _import_classifier(args: argparse.Namespace) -> "ClassifierReport":
    import numpy as np

    from precompute.adapters.classifiers import from_classifier

    try:
        expected_outputs = None if args.expected is None else np.load(args.expected)
    except (OSError, ValueError) as error:
        raise SourceError(f"--expected {args.expected}: {error}; it must be a .npy file") from None
    return from_classifier(
        args.model, args.features, to=args.to, labels=_split_names(args.labels), table=args.table,
        id_column=args.id_column, columns=None if args.columns is None else _split_names(args.columns),
        output=args.output, expected=expected_outputs,
    )  # fmt: skip


_IMPORT_BY_KIND: Mapping[str, "Callable[[argparse.Namespace], ClassifierReport | ImportReport]"] = {
    "vectors": _import_vectors,
    "implicit": _import_implicit,
    "classifier": _import_classifier,
}
