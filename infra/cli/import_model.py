"""`larder import`: makes a folder for a night from files of models that other libraries fitted."""

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
    """Return the error with this command's options in place of setting and argument names."""
    message = error.message
    for setting_name in _SETTING_NAMES:
        message = message.replace(f"name it by {setting_name}", f"name it by --{setting_name.replace('_', '-')}")
    return SourceError(message, **error.details)


def argument_parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Make a folder with bundle, larder.toml and what else a night reads, of a model that another "
        "library fitted. From Python: precompute.adapters. Exit code: 0 written, 2 refused: nothing was written.",
    )
    kind_parsers = parser.add_subparsers(required=True, metavar="KIND", dest="kind")
    vectors_parser = kind_parsers.add_parser(
        "vectors",
        help="vectors of items, and of users if there are any",
        description="From vectors: a Parquet file with a column of ids and one of lists of numbers, or a .npy file.",
    )
    vectors_parser.add_argument("--items", required=True, metavar="FILE", help="vectors of items")
    vectors_parser.add_argument("--users", metavar="FILE", help="vectors of users")
    vectors_parser.add_argument(
        "--metric", choices=["inner_product", "cosine"], default="inner_product", help="default: %(default)s"
    )  # fmt: skip
    implicit_parser = kind_parsers.add_parser(
        "implicit",
        help="ALS, BPR or LMF of the library implicit",
        description="From the .npz file that a model's `save` writes; implicit need not be installed.",
    )
    implicit_parser.add_argument("model", metavar="FILE", help="what `model.save` wrote")
    classifier_parser = kind_parsers.add_parser(
        "classifier",
        help="a classifier or regressor as ONNX: XGBoost, LightGBM, scikit-learn",
        description="From an ONNX file, and a table with a row for each id that a night scores.",
    )
    classifier_parser.add_argument("model", metavar="FILE", help="the model as ONNX")
    classifier_parser.add_argument(
        "--features", required=True, metavar="FILE", help="a row for each id, in Parquet or CSV"
    )
    classifier_parser.add_argument(
        "--labels", required=True, metavar="A,B", help="a name for each number that the model gives, in its order"
    )  # fmt: skip
    classifier_parser.add_argument(
        "--id-column", default="user", metavar="NAME", help="column of ids, default: %(default)s"
    )
    classifier_parser.add_argument(
        "--columns", metavar="A,B", help="columns that a model with one input takes, in its order; default: all others"
    )  # fmt: skip
    classifier_parser.add_argument(
        "--table", default="prediction", metavar="NAME", help="table that requests ask, default: %(default)s"
    )
    classifier_parser.add_argument("--output", metavar="NAME", help="output of the model, if there are several")
    classifier_parser.add_argument(
        "--expected", metavar="FILE", help="what the library says of each row, as .npy: compared with the model"
    )
    for kind_parser in (vectors_parser, implicit_parser, classifier_parser):
        kind_parser.add_argument("--to", required=True, metavar="FOLDER", help="where it is written")
        kind_parser.add_argument("--json", action="store_true", help="the report, for programs")
    for kind_parser in (vectors_parser, implicit_parser):
        kind_parser.add_argument(
            "--clicks", required=kind_parser is implicit_parser, metavar="FILE",
            help="what users did: user,item in Parquet or CSV, or a scipy matrix [users, items] in .npz",
        )  # fmt: skip
        for entity_kind in ("user", "item"):
            help_text = f"column of {entity_kind} ids in a table of clicks, default: %(default)s"
            kind_parser.add_argument(f"--{entity_kind}-column", default=entity_kind, metavar="NAME", help=help_text)
        kind_parser.add_argument(
            "--timestamp-column", default="timestamp", metavar="NAME",
            help="column of times, which put clicks in their order, default: %(default)s",
        )  # fmt: skip
        kind_parser.add_argument("--item-ids", metavar="FILE", help="one id a line, in the order of the rows")
        kind_parser.add_argument("--user-ids", metavar="FILE", help="the same of users")
    return parser


def _click_source(args: argparse.Namespace) -> Any:
    """Return the path of a matrix, or the sources of a table with its columns; None without clicks."""
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
    """Return the names of a list with commas, without blanks around them."""
    return [name.strip() for name in comma_list.split(",")]


def _import_classifier(args: argparse.Namespace) -> "ClassifierReport":
    import numpy as np

    from precompute.adapters.classifiers import from_classifier

    try:
        expected_outputs = None if args.expected is None else np.load(args.expected)
    except (OSError, ValueError) as error:
        raise SourceError(f"--expected {args.expected}: {error}; it is a .npy file") from None
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
