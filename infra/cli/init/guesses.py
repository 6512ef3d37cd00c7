"""Guesses which of a folder's tables hold interactions and features, and the roles of their columns."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from infra.cli.init.tables import FILE_ERRORS, ColumnKind, FoundTable, are_unique
from precompute.sources.plausibility import has_lists_of_ids

Role = Literal["user", "item", "timestamp", "weight", "category"]

KINDS_BY_ROLE: Final[Mapping[Role, tuple[ColumnKind, ...]]] = {
    "user": ("integer", "text"),
    "item": ("integer", "text"),
    "timestamp": ("time", "integer", "float", "text"),
    "weight": ("integer", "float", "text"),
    "category": ("text", "integer"),
}
"""Role -> kinds of columns from which a night can read it."""

FEW_ITEMS_END = 1_024
"""Number of items below which most of the reference model's 256 dimensions are noise."""

TIME_TEXT_SHARE_MIN = 0.99
"""Minimum share of texts that are times, or missing, in a column of times; a night leaves the other rows out."""

SECONDS_MAX = 100_000_000_000
"""Largest number read as seconds since 1970 (year 5138); larger ones are milliseconds or smaller units."""

_COLUMN_NAMES_BY_ROLE: Final[Mapping[Role, tuple[str, ...]]] = {
    "user": (
        "user", "userid", "uid", "username", "customer", "customerid", "cust", "custid", "customernumber", "visitor",
        "visitorid", "member", "memberid", "account", "accountid", "client", "clientid", "reviewer", "reviewerid",
        "reader", "readerid", "viewer", "viewerid", "player", "playerid", "listener", "listenerid", "subscriber",
        "subscriberid", "profileid", "person", "personid", "buyer", "buyerid", "session", "sessionid",
    ),
    "item": (
        "item", "itemid", "iid", "product", "productid", "pid", "sku", "asin", "parentasin", "movie", "movieid", "film",
        "filmid", "track", "trackid", "song", "songid", "artist", "artistid", "album", "albumid", "article",
        "articleid", "news", "newsid", "post", "postid", "book", "bookid", "isbn", "video", "videoid", "game", "gameid",
        "appid", "ad", "adid", "offer", "offerid", "listing", "listingid", "business", "businessid", "content",
        "contentid", "anime", "animeid", "recipe", "recipeid", "show", "showid", "stockcode", "merchantid", "poi",
    ),
    "timestamp": (
        "timestamp", "ts", "time", "datetime", "date", "eventtime", "eventtimestamp", "eventdate", "unixtime",
        "unixtimestamp", "unixreviewtime", "createdat", "created", "createtime", "updatedat", "occurredat", "at",
        "when", "tdat", "invoicedate", "orderdate", "purchasedate", "clicktime", "reviewtime", "listenedat", "day",
    ),
    "weight": (
        "weight", "rating", "ratings", "score", "stars", "overall", "preference", "strength", "count", "cnt", "plays",
        "playcount", "listencount", "clicks", "views", "quantity", "qty", "value", "feedback", "confidence", "amount",
    ),
    "category": (
        "category", "categories", "categoryid", "categoryname", "maincategory", "genre", "genres", "department",
        "brand", "producttype", "productgroup", "productgroupname", "class", "section", "topic", "type",
    ),
}  # fmt: skip
"""Role -> normalised column names, the most reliable first."""

_TIME_NAME_PATTERN: Final = re.compile(r"([\W_](at|ts|date|timestamp)|[a-z](At|Date|Timestamp))$")
"""Ending of a time column's name of several words: `ordered_at`, `viewDate`."""

_NUMBERED_NAME_PATTERN: Final = re.compile(r"(no|nr|num|number|code|key)$")

_NAMES_OF_NO_IDS: Final = frozenset(
    {
        "", "index", "id", "unnamed0", "title", "name", "description", "text", "comment", "review", "url", "image",
        "price", "country", "city", "gender", "sex", "age", "device", "event", "eventtype", "action", "language",
        "year",
    }
)  # fmt: skip
"""Normalised names of columns that are never guessed to be ids merely because they are the last column left."""


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """Column of each recognised role, and remarks on columns with the name of a role but unfit values."""

    column_by_role: Mapping[Role, str]
    guessed_roles: tuple[Role, ...] = ()
    """Roles whose column has no matching name, but was the only one left."""
    unfit_column_by_role: Mapping[Role, str] = field(default_factory=dict)
    """Role -> column of ids whose name matches, but whose values a night refuses; no other column has the role."""
    remarks: tuple[str, ...] = ()


def normalise_name(column_name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[\W_]", "", column_name.lower())


def guess_roles(kind_by_column: Mapping[str, ColumnKind]) -> ColumnRoles:
    """Return the roles of a table's columns: by exact name, else by the name's ending, else the only column left."""
    column_by_role: dict[Role, str] = {}
    remarks: list[str] = []
    unfit_column_by_role: dict[Role, str] = {}
    for role, role_names in _COLUMN_NAMES_BY_ROLE.items():
        for column_name in _columns_by_role_name(
            role, role_names, [column for column in kind_by_column if column not in column_by_role.values()]
        ):
            if kind_by_column[column_name] in KINDS_BY_ROLE[role]:
                column_by_role[role] = column_name
                break
            if role in ("user", "item"):
                unfit_column_by_role.setdefault(role, column_name)
            remarks.append(describe_unfit_column(role, column_name, kind_by_column[column_name]))
    guessed_roles: list[Role] = []
    for role in ("user", "item"):
        other_role: Role = "item" if role == "user" else "user"
        id_like_columns = [
            column
            for column in kind_by_column
            if column not in column_by_role.values() and _is_like_an_id(column, kind_by_column[column])
        ]
        if role in column_by_role:
            unfit_column_by_role.pop(role, None)
        elif (
            role not in unfit_column_by_role
            and other_role in column_by_role
            and len(id_like_columns) == 1
            and len(kind_by_column) > 1
        ):
            column_by_role[role], guessed_roles = id_like_columns[0], [*guessed_roles, role]
    time_columns = [
        column for column, kind in kind_by_column.items() if kind == "time" and column not in column_by_role.values()
    ]
    if "timestamp" not in column_by_role and len(time_columns) == 1:
        column_by_role["timestamp"] = time_columns[0]
        guessed_roles.append("timestamp")
    return ColumnRoles(column_by_role, tuple(guessed_roles), unfit_column_by_role, tuple(remarks))


def _columns_by_role_name(role: Role, role_names: Sequence[str], column_names: Sequence[str]) -> list[str]:
    """Return the columns that may have a role, the most likely first."""
    matching_columns = [
        column for candidate_name in role_names for column in column_names if normalise_name(column) == candidate_name
    ]
    if role in ("user", "item"):
        # Names such as `customer_no` and `article_nr` are ids, too.
        matching_columns += [
            column
            for column in column_names
            if column not in matching_columns and _NUMBERED_NAME_PATTERN.sub("", normalise_name(column)) in role_names
        ]
        # Then names of several words, such as `src_user_id` and `clicked_article`.
        name_endings = tuple(role_name for role_name in role_names if len(role_name) > 3)
        matching_columns += [
            column
            for column in column_names
            if column not in matching_columns and normalise_name(column).endswith(name_endings)
        ]
    if role == "timestamp":
        matching_columns += [
            column for column in column_names if column not in matching_columns and _TIME_NAME_PATTERN.search(column)
        ]
    return matching_columns


def _is_like_an_id(column_name: str, column_kind: ColumnKind) -> bool:
    normalised_name = normalise_name(column_name)
    has_other_role_name = any(
        normalised_name in _COLUMN_NAMES_BY_ROLE[role] for role in ("timestamp", "weight", "category")
    )
    return column_kind in KINDS_BY_ROLE["user"] and not has_other_role_name and normalised_name not in _NAMES_OF_NO_IDS


def describe_unfit_column(role: Role, column_name: str, column_kind: ColumnKind) -> str:
    """Return a message on a column that has the name of a role, but a kind of values that a night cannot read."""
    remedy = "it is left out"
    if role in ("user", "item"):
        remedy = "ids are text or whole numbers: convert the column, with one row for each id"
    if role in ("user", "item") and column_kind == "float":
        remedy = (
            "ids are text or whole numbers (pandas turns integers into floats if a value is missing: convert the "
            "column to Int64 before writing, so that CSV has 17850 instead of 17850.0)"
        )
    return f"column {column_name!r} looks like the {role}, but holds {column_kind} values: {remedy}"


@dataclass
class Guesses:
    """Guessed settings, with notes on their reasons; a column is None if it was not recognised."""

    interactions: FoundTable | None = None
    column_by_role: dict[Role, str | None] = field(default_factory=dict)
    feature_table_by_entity: dict[str, FoundTable] = field(default_factory=dict)
    """Feature tables by entity, `item` or `user`."""
    category_column: str | None = None
    item_count_if_few: int | None = None
    """Number of items if it is below FEW_ITEMS_END, so that the reference model's vectors should be shorter."""
    guess_notes: list[str] = field(default_factory=list)
    """Notes on guesses that may be wrong, and on unused files, each with a remedy."""
    missing_setting_lines: list[str] = field(default_factory=list)
    """Required settings that could not be guessed, each with the line to write."""

    @property
    def is_complete(self) -> bool:
        """True if the user has no setting to fill in."""
        return not self.missing_setting_lines


def guess_settings(tables_by_size: Sequence[FoundTable], table_remarks: Sequence[str]) -> Guesses:
    """Guess the settings from the tables, which are sorted by size, largest first."""
    setting_guesses = Guesses(guess_notes=list(table_remarks))
    roles_by_title = {
        candidate_table.title: guess_roles(candidate_table.kind_by_column) for candidate_table in tables_by_size
    }
    interaction_tables = [
        candidate_table
        for candidate_table in tables_by_size
        if {"user", "item"} <= roles_by_title[candidate_table.title].column_by_role.keys()
    ]
    # A table with an id column that was only guessed counts if no table has both by name.
    interaction_tables = [
        candidate_table
        for candidate_table in interaction_tables
        if not {"user", "item"} & {*roles_by_title[candidate_table.title].guessed_roles}
    ] or interaction_tables[:1]
    if interaction_tables:
        _guess_interactions(setting_guesses, interaction_tables, roles_by_title)
    elif tables_by_size:
        found_table = max(
            tables_by_size, key=lambda candidate_table: _id_column_count(roles_by_title[candidate_table.title])
        )
        _guess_half_recognised(setting_guesses, found_table, roles_by_title[found_table.title])
    else:
        no_table_reason = (
            "none of the files found can be read (see the notes)"
            if table_remarks
            else "no Parquet or CSV file was found"
        )
        setting_guesses.missing_setting_lines.append(
            f'[sources] interactions: {no_table_reason}; write e.g. ["clicks/*.parquet"], or repair the files and run '
            "`larder init --force`"
        )
    for found_table in tables_by_size:
        if found_table is not setting_guesses.interactions:
            setting_guesses.guess_notes += found_table.unread_file_remarks
        if found_table in interaction_tables or found_table is setting_guesses.interactions:
            continue
        try:
            _guess_features(setting_guesses, found_table, roles_by_title[found_table.title])
        except FILE_ERRORS as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            setting_guesses.guess_notes.append(f"{found_table.title} is not used: it cannot be read: {reason}")
    setting_guesses.item_count_if_few = _item_count_if_few(setting_guesses)
    if (interactions_table := setting_guesses.interactions) is not None and interactions_table.unread_file_remarks:
        # The pattern includes the unreadable files, so that a night fails instead of silently leaving their rows out.
        setting_guesses.interactions = replace(interactions_table, pattern_parts=interactions_table.whole_pattern_parts)
        setting_guesses.missing_setting_lines += [
            f"{remark}; a night reads all of {', '.join(interactions_table.whole_pattern_parts[:3])} or "
            "nothing: repair "
            "the file, or move it away"
            for remark in interactions_table.unread_file_remarks
        ]
    return setting_guesses


def _guess_interactions(
    setting_guesses: Guesses, interaction_tables: list[FoundTable], roles_by_title: dict[str, ColumnRoles]
) -> None:
    interactions_table, *other_tables = interaction_tables
    column_roles = roles_by_title[interactions_table.title]
    setting_guesses.interactions = interactions_table
    setting_guesses.column_by_role = {
        column_name: column_roles.column_by_role.get(column_name)
        for column_name in ("user", "item", "timestamp", "weight")
    }
    setting_guesses.guess_notes += column_roles.remarks
    for role in column_roles.guessed_roles:
        guess_reason = "no other column holds times" if role == "timestamp" else "no other column is left"
        setting_guesses.guess_notes.append(
            f"column {column_roles.column_by_role[role]!r} is taken for the {role} because {guess_reason}; if that is "
            "wrong, change "
            f"{role}_column"
        )
    if (column_name := setting_guesses.column_by_role["item"]) is not None and has_lists_of_ids(
        interactions_table.sample_table[column_name]
    ):
        setting_guesses.guess_notes.append(
            f"column {column_name!r} seems to hold a whole history in each field: hardly any value is repeated, and "
            "most have several words. A row is one item of one user: write one row for each item"
        )
    if (column_name := setting_guesses.column_by_role["timestamp"]) is not None and (
        remark := _unreadable_times_reason(interactions_table.sample_table[column_name])
    ):
        setting_guesses.column_by_role["timestamp"] = None
        setting_guesses.guess_notes.append(f"column {column_name!r} {remark}")
    elif column_name is None:
        unassigned_columns = [
            column
            for column in interactions_table.kind_by_column
            if column not in setting_guesses.column_by_role.values()
        ]
        if unassigned_columns:
            setting_guesses.guess_notes.append(
                f"no column of times was recognised among {', '.join(unassigned_columns)}: if one holds times, write "
                "its name into "
                "timestamp_column; without times the order of rows is used"
            )
    if (column_name := setting_guesses.column_by_role["weight"]) is not None:
        setting_guesses.guess_notes += _notes_on_weight(interactions_table, column_name)
    if setting_guesses.column_by_role["timestamp"] is None:
        setting_guesses.guess_notes += _notes_on_folder_keys(interactions_table)
    for other_table in other_tables:
        setting_guesses.guess_notes.append(
            f"{other_table.title} holds users and items, too, and is not used; if it holds interactions, add it to "
            "interactions "
            "(its columns must have the same names)"
        )


def _notes_on_folder_keys(found_table: FoundTable) -> list[str]:
    """Return a note on Hive partition keys in folder names that are not columns as well; empty without such keys."""
    folder_names = (folder_name for file in found_table.file_paths for folder_name in file.parent.parts)
    folder_keys = dict.fromkeys(folder_name.partition("=")[0] for folder_name in folder_names if "=" in folder_name)
    keys_text = ", ".join(
        folder_key for folder_key in folder_keys if folder_key and folder_key not in found_table.kind_by_column
    )
    if not keys_text:
        return []
    note = (
        f"the folders of {found_table.title} have values of {keys_text} in their names, which are not read: "
        "write them into a column of the files"
    )
    return [note]


def _item_count_if_few(setting_guesses: Guesses) -> int | None:
    """Return the number of items in the features, else in the first rows; None unless it is below FEW_ITEMS_END."""
    interactions_table, item_column = (setting_guesses.interactions, setting_guesses.column_by_role.get("item"))
    if (
        item_table := setting_guesses.feature_table_by_entity.get("item")
    ) is not None and item_table.row_count is not None:
        item_count = item_table.row_count
    elif (
        interactions_table is not None
        and item_column is not None
        and _has_ids(interactions_table.sample_table[item_column], interactions_table.kind_by_column[item_column])
    ):
        item_count = pc.count_distinct(interactions_table.sample_table[item_column]).as_py()
    else:
        return None
    return item_count if item_count < FEW_ITEMS_END else None


def _id_column_count(roles: ColumnRoles) -> int:
    """Return the number of a table's id columns, including unfit ones."""
    return len({"user", "item"} & {*roles.column_by_role, *roles.unfit_column_by_role})


def _has_ids(sample_column: Any, column_kind: ColumnKind) -> bool:
    return bool(len(sample_column) > sample_column.null_count and column_kind in KINDS_BY_ROLE["item"])


def _guess_half_recognised(setting_guesses: Guesses, found_table: FoundTable, column_roles: ColumnRoles) -> None:
    """Use the table with the most id columns as interactions; the user fills in its unrecognised columns."""
    setting_guesses.interactions = found_table
    setting_guesses.column_by_role = {
        column_name: column_roles.column_by_role.get(column_name, column_roles.unfit_column_by_role.get(column_name))
        for column_name in ("user", "item", "timestamp", "weight")
    }
    unfit_remark_by_role = {
        role: describe_unfit_column(role, column_name, found_table.kind_by_column[column_name])
        for role, column_name in column_roles.unfit_column_by_role.items()
    }
    setting_guesses.guess_notes += [
        remark for remark in column_roles.remarks if remark not in unfit_remark_by_role.values()
    ]
    setting_guesses.missing_setting_lines += [
        f"{found_table.title}: {remark}" for remark in unfit_remark_by_role.values()
    ]
    setting_guesses.guess_notes += _notes_on_folder_keys(found_table)
    if list_columns := [
        column_name for column_name in found_table.kind_by_column if _is_list_column(found_table, column_name)
    ]:
        setting_guesses.guess_notes.append(
            f"column {list_columns[0]!r} of {found_table.title} holds lists: a row is one item of one user, so "
            "write one row for each value of a list (in pandas with explode, in SQL with unnest)"
        )
    for role in ("user", "item"):
        if role not in column_roles.column_by_role and role not in column_roles.unfit_column_by_role:
            setting_guesses.missing_setting_lines.append(
                f"[sources] {role}_column: none of the columns of {found_table.title} "
                f"({', '.join(found_table.kind_by_column)}) has a usual name for {role} ids; write the name "
                "of the column "
                "that holds them"
            )


def _is_list_column(table: FoundTable, column_name: str) -> bool:
    arrow_type = table.sample_table.schema.field(column_name).type
    return bool(pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type))


def _guess_features(setting_guesses: Guesses, found_table: FoundTable, column_roles: ColumnRoles) -> None:
    """Add a table with one row per item, or per user, to the features if a night can read it; else add a note."""
    for entity in ("item", "user"):
        role: Role = "item" if entity == "item" else "user"
        if (id_column := column_roles.column_by_role.get(role)) is None or role in column_roles.guessed_roles:
            continue
        if len(found_table.kind_by_column) == 2 and "vector" in found_table.kind_by_column.values():
            setting_guesses.guess_notes.append(
                f"{found_table.title} looks like vectors of {entity}s, and is not used: `larder import vectors` "
                "makes a folder for nights from vectors"
            )
            return
        title_clause, interactions_column = (
            f"{found_table.title} looks like features of {entity}s",
            setting_guesses.column_by_role.get(role),
        )
        if found_table.file_format != "parquet":
            remark = "features are read from Parquet: convert it (pandas: read_csv(...).to_parquet(...))"
        elif (
            interactions_column is not None
            and id_column != interactions_column
            and interactions_column not in found_table.kind_by_column
        ):
            remark = (
                f"its ids are in column {id_column!r}, those of the interactions in {interactions_column!r}: "
                "give both the same name"
            )
        elif not are_unique(found_table, id_column if interactions_column is None else interactions_column):
            remark = "some ids come twice: only one row of each would be used"
        elif len(found_table.file_paths) > 1:
            remark = f"it has {len(found_table.file_paths)} files: merge them into one"
        elif entity in setting_guesses.feature_table_by_entity:
            remark = f"{setting_guesses.feature_table_by_entity[entity].title} is used instead: join the two tables"
        else:
            setting_guesses.feature_table_by_entity[entity] = found_table
            if role == "item":
                setting_guesses.category_column = column_roles.column_by_role.get("category")
            return
        setting_guesses.guess_notes.append(f"{title_clause}, but is not used: {remark}")
        return
    setting_guesses.guess_notes.append(
        f"{found_table.title} is not used: neither users nor items were recognised in it"
    )


def _unreadable_times_reason(time_column: Any) -> str | None:
    """Return the reason why a night cannot read a column's times; None if it can."""
    arrow_type = time_column.type
    if pa.types.is_timestamp(arrow_type) or pa.types.is_date(arrow_type) or pa.types.is_null(arrow_type):
        return None
    if pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type):
        if (pc.mean(pc.greater(time_column, SECONDS_MAX)).as_py() or 0) > 0.5:
            return (
                "holds milliseconds or smaller units since 1970, but seconds are expected: it is left out; divide its "
                "values, or write them as timestamps"
            )
        return None
    from precompute.sources.times import parse_time_texts

    _, readable_mask, missing_mask = parse_time_texts(time_column.combine_chunks())
    if (readable_mask | missing_mask).mean() < TIME_TEXT_SHARE_MIN:
        return "holds texts that are no times in ISO 8601: it is left out; write it as timestamps"
    return None


def _notes_on_weight(table: FoundTable, weight_column: str) -> list[str]:
    sample_weights = table.sample_table[weight_column]
    remark = f"rows with {weight_column!r} above 0 are interactions of equal weight: 5 counts the same as 1"
    if not (pa.types.is_integer(sample_weights.type) or pa.types.is_floating(sample_weights.type)) or not len(
        sample_weights
    ):
        return [remark]
    nonpositive_count = pc.sum(pc.less_equal(sample_weights, 0)).as_py() or 0
    nonpositive_share_text = (
        f" ({nonpositive_count / len(sample_weights):.0%} of the first rows are not)" if nonpositive_count else ""
    )
    low_ratings_remark = "; low ratings count like high ones, so remove low ratings from the file, or set them to 0"
    is_rating = normalise_name(weight_column) in ("rating", "ratings", "score", "stars", "overall")
    return [f"{remark}{nonpositive_share_text}{low_ratings_remark if is_rating else ''}"]
