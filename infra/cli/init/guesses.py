"""Guesses about a folder's tables: columns' roles by name and type, interactions, and features."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from infra.cli.init.tables import ERRORS, ColumnKind, FoundTable, are_unique
from precompute.sources.plausibility import has_lists_of_ids

Role = Literal["user", "item", "timestamp", "weight", "category"]

KINDS_BY_ROLE: Final[Mapping[Role, tuple[ColumnKind, ...]]] = {
    "user": ("integer", "text"),
    "item": ("integer", "text"),
    "timestamp": ("time", "integer", "float", "text"),
    "weight": ("integer", "float", "text"),
    "category": ("text", "integer"),
}
"""Role -> kinds of columns that a night can read for it."""

FEW_ITEMS = 1_024
"""Number of items below which 256 dimensions of the reference model are mostly noise."""

TIMES_LEAST = 0.99
"""Share of a column's texts that are times, or missing, in a column of times: a night leaves the other rows out."""

MILLISECONDS_FROM = 100_000_000_000
"""Bound above which numbers are no seconds since 1970 (of the year 5138) but milliseconds or smaller units."""

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
"""Role -> names without case, underscores and the like; the most reliable first."""

_TIME_NAME: Final = re.compile(r"([\W_](at|ts|date|timestamp)|[a-z](At|Date|Timestamp))$")
"""Ending of a multi-word name of a time column: `ordered_at`, `viewDate`."""

_NUMBERED_NAME: Final = re.compile(r"(no|nr|num|number|code|key)$")

_NO_ID: Final = frozenset(
    {
        "", "index", "id", "unnamed0", "title", "name", "description", "text", "comment", "review", "url", "image",
        "price", "country", "city", "gender", "sex", "age", "device", "event", "eventtype", "action", "language",
        "year",
    }
)  # fmt: skip
"""Names of columns that are never taken for ids just because no other column is left."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Column of each recognised role, and remarks on columns that only seem to have one."""

    columns: Mapping[Role, str]
    guessed: tuple[Role, ...] = ()
    """Roles that were assigned to the one remaining column, without a matching name."""
    unfit: Mapping[Role, str] = field(default_factory=dict)
    """Columns of ids by role that match its name, though a night refuses their values; no other column has the role."""
    remarks: tuple[str, ...] = ()


def normalise_name(name: str) -> str:
    """Return a name in lower case, without characters that are no letter or digit."""
    return re.sub(r"[\W_]", "", name.lower())


def roles_of(columns: Mapping[str, ColumnKind]) -> Roles:
    """Return the roles of a table's columns: by exact name first, then by ending, finally the one remaining column."""
    column_by_role: dict[Role, str] = {}
    remarks: list[str] = []
    unfit: dict[Role, str] = {}
    for role, names in _COLUMN_NAMES_BY_ROLE.items():
        for name in _by_name(
            role, names, [column for column in columns if column not in column_by_role.values()]
        ):
            if columns[name] in KINDS_BY_ROLE[role]:
                column_by_role[role] = name
                break
            if role in ("user", "item"):
                unfit.setdefault(role, name)
            remarks.append(unfit_in_words(role, name, columns[name]))
    guessed: list[Role] = []
    for role in ("user", "item"):
        other_role: Role = "item" if role == "user" else "user"
        id_like_columns = [
            column
            for column in columns
            if column not in column_by_role.values() and _like_an_id(column, columns[column])
        ]
        if role in column_by_role:
            unfit.pop(role, None)
        elif (
            role not in unfit
            and other_role in column_by_role
            and len(id_like_columns) == 1
            and len(columns) > 1
        ):
            column_by_role[role], guessed = id_like_columns[0], [*guessed, role]
    times = [
        column
        for column, kind in columns.items()
        if kind == "time" and column not in column_by_role.values()
    ]
    if "timestamp" not in column_by_role and len(times) == 1:
        column_by_role["timestamp"] = times[0]
        guessed.append("timestamp")
    return Roles(column_by_role, tuple(guessed), unfit, tuple(remarks))


def _by_name(role: Role, names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the columns that may have a role, the most likely first."""
    exact = [column for name in names for column in columns if normalise_name(column) == name]
    if role in ("user", "item"):
        # A number is an id as well: `customer_no`, `article_nr`.
        exact += [
            column
            for column in columns
            if column not in exact and _NUMBERED_NAME.sub("", normalise_name(column)) in names
        ]
        # Of several words: `src_user_id`, `clicked_article`.
        ends = tuple(role_name for role_name in names if len(role_name) > 3)
        exact += [
            column
            for column in columns
            if column not in exact and normalise_name(column).endswith(ends)
        ]
    if role == "timestamp":
        exact += [column for column in columns if column not in exact and _TIME_NAME.search(column)]
    return exact


def _like_an_id(name: str, kind: ColumnKind) -> bool:
    normalised_name = normalise_name(name)
    is_other = any(
        normalised_name in _COLUMN_NAMES_BY_ROLE[role]
        for role in ("timestamp", "weight", "category")
    )
    return kind in KINDS_BY_ROLE["user"] and not is_other and normalised_name not in _NO_ID


def unfit_in_words(role: Role, name: str, kind: ColumnKind) -> str:
    """Describe a column that has the name of a role and values of a kind that a night cannot read for it."""
    remedy = "it is left out"
    if role in ("user", "item"):
        remedy = "ids are text or whole numbers: write the column so, with a row for each id"
    if role in ("user", "item") and kind == "float":
        remedy = (
            "ids are text or whole numbers (pandas makes floats of numbers where one is missing: make the column Int64 "
            "before it is written, so that CSV has 17850 in place of 17850.0)"
        )
    return f"column {name!r} looks like the {role}, but holds {kind} values: {remedy}"


@dataclass
class Guesses:
    """Guesses with notes on their reasons; a column that is None was not recognised."""

    interactions: FoundTable | None = None
    columns: dict[Role, str | None] = field(default_factory=dict)
    features: dict[str, FoundTable] = field(default_factory=dict)
    """Feature tables, by `item` and `user`."""
    category: str | None = None
    items: int | None = None
    """Number of items, if it is so small that the reference model's vectors should be shorter."""
    notes: list[str] = field(default_factory=list)
    """Notes on guesses that may be wrong, and on unused files, each with a remedy."""
    missing: list[str] = field(default_factory=list)
    """Settings that a night needs and that could not be guessed, each with the line to write."""

    @property
    def is_complete(self) -> bool:
        """True if no setting has to be written by hand."""
        return not self.missing


def guess(tables: Sequence[FoundTable], remarks: Sequence[str]) -> Guesses:
    """Guess from tables, the largest first."""
    guesses = Guesses(notes=list(remarks))
    roles_by_title = {
        candidate_table.title: roles_of(candidate_table.columns) for candidate_table in tables
    }
    interaction_tables = [
        candidate_table
        for candidate_table in tables
        if {"user", "item"} <= roles_by_title[candidate_table.title].columns.keys()
    ]
    # A column that was only left over counts where no other table has both by name.
    interaction_tables = [
        candidate_table
        for candidate_table in interaction_tables
        if not {"user", "item"} & {*roles_by_title[candidate_table.title].guessed}
    ] or interaction_tables[:1]
    if interaction_tables:
        _interactions(guesses, interaction_tables, roles_by_title)
    elif tables:
        table = max(
            tables, key=lambda candidate_table: _recognised(roles_by_title[candidate_table.title])
        )
        _half_recognised(guesses, table, roles_by_title[table.title])
    else:
        no_table_reason = (
            "none of the files found can be read (see the notes)"
            if remarks
            else "no Parquet or CSV file was found"
        )
        guesses.missing.append(
            f'[sources] interactions: {no_table_reason}; write e.g. ["clicks/*.parquet"], or mend that and run '
            "`larder init --force`"
        )
    for table in tables:
        if table is not guesses.interactions:
            guesses.notes += table.unread
        if table in interaction_tables or table is guesses.interactions:
            continue
        try:
            _features(guesses, table, roles_by_title[table.title])
        except ERRORS as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            guesses.notes.append(f"{table.title} is not used: it cannot be read: {reason}")
    guesses.items = _few_items(guesses)
    if (clicks := guesses.interactions) is not None and clicks.unread:
        # The next command names the file, too: a night without its rows would say nothing.
        guesses.interactions = replace(clicks, pattern=clicks.whole_pattern)
        guesses.missing += [
            f"{remark}; a night reads all of {', '.join(clicks.whole_pattern[:3])} or nothing: mend it, or move it away"
            for remark in clicks.unread
        ]
    return guesses


def _interactions(
    guesses: Guesses, interaction_tables: list[FoundTable], roles_by_title: dict[str, Roles]
) -> None:
    table, *other_tables = interaction_tables
    roles = roles_by_title[table.title]
    guesses.interactions = table
    guesses.columns = {
        name: roles.columns.get(name) for name in ("user", "item", "timestamp", "weight")
    }
    guesses.notes += roles.remarks
    for role in roles.guessed:
        guess_reason = "it alone holds times" if role == "timestamp" else "no other is left"
        guesses.notes.append(
            f"column {roles.columns[role]!r} is taken for the {role} because {guess_reason}; if it is not, change "
            f"{role}_column"
        )
    if (name := guesses.columns["item"]) is not None and has_lists_of_ids(table.sample[name]):
        guesses.notes.append(
            f"column {name!r} seems to hold a whole history in each field: hardly one comes twice, and most hold "
            "several words. A row is one item of one user: write a row for each"
        )
    if (name := guesses.columns["timestamp"]) is not None and (
        remark := _no_times(table.sample[name])
    ):
        guesses.columns["timestamp"] = None
        guesses.notes.append(f"column {name!r} {remark}")
    elif name is None:
        unassigned_columns = [
            column for column in table.columns if column not in guesses.columns.values()
        ]
        if unassigned_columns:
            guesses.notes.append(
                f"no column of times was recognised among {', '.join(unassigned_columns)}: if one holds them, write it "
                "into "
                "timestamp_column; without times the order of rows counts"
            )
    if (name := guesses.columns["weight"]) is not None:
        guesses.notes += _about_weight(table, name)
    if guesses.columns["timestamp"] is None:
        guesses.notes += _folder_keys_in_words(table)
    for other_table in other_tables:
        guesses.notes.append(
            f"{other_table.title} holds users and items, too, and is not used; if it counts, write it into "
            "interactions "
            "(its columns must have the same names)"
        )


def _folder_keys_in_words(table: FoundTable) -> list[str]:
    """Return a note on values in folders' names, as Hive writes them, that no column has; none without any."""
    parts = (part for file in table.files for part in file.parent.parts)
    keys = dict.fromkeys(part.partition("=")[0] for part in parts if "=" in part)
    names = ", ".join(key for key in keys if key and key not in table.columns)
    if not names:
        return []
    note = (
        f"the folders of {table.title} have values of {names} in their names, which are not read: write them into the "
        "files as a column"
    )
    return [note]


def _few_items(guesses: Guesses) -> int | None:
    """Return the number of items in the features or the first rows, if it is below FEW_ITEMS."""
    table, name = guesses.interactions, guesses.columns.get("item")
    if (features := guesses.features.get("item")) is not None and features.rows is not None:
        count = features.rows
    elif (
        table is not None and name is not None and _has_ids(table.sample[name], table.columns[name])
    ):
        count = pc.count_distinct(table.sample[name]).as_py()
    else:
        return None
    return count if count < FEW_ITEMS else None


def _recognised(roles: Roles) -> int:
    """Return the number of a table's id columns, including unfit ones."""
    return len({"user", "item"} & {*roles.columns, *roles.unfit})


def _has_ids(column: Any, kind: ColumnKind) -> bool:
    return bool(len(column) > column.null_count and kind in KINDS_BY_ROLE["item"])


def _half_recognised(guesses: Guesses, table: FoundTable, roles: Roles) -> None:
    """Take the table with the most id columns for the interactions; its unrecognised columns are left to write."""
    guesses.interactions = table
    guesses.columns = {
        name: roles.columns.get(name, roles.unfit.get(name))
        for name in ("user", "item", "timestamp", "weight")
    }
    unfit = {
        role: unfit_in_words(role, name, table.columns[name]) for role, name in roles.unfit.items()
    }
    guesses.notes += [remark for remark in roles.remarks if remark not in unfit.values()]
    guesses.missing += [f"{table.title}: {remark}" for remark in unfit.values()]
    guesses.notes += _folder_keys_in_words(table)
    if lists := [name for name in table.columns if _holds_lists(table, name)]:
        guesses.notes.append(
            f"column {lists[0]!r} of {table.title} holds lists: a row is one item of one user, so write a row for each "
            "of a list's values (in pandas explode, in SQL unnest)"
        )
    for role in ("user", "item"):
        if role not in roles.columns and role not in roles.unfit:
            guesses.missing.append(
                f"[sources] {role}_column: none of the columns of {table.title} ({', '.join(table.columns)}) is called "
                f"like one; write the name of the column of {role} ids"
            )


def _holds_lists(table: FoundTable, name: str) -> bool:
    kind = table.sample.schema.field(name).type
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _features(guesses: Guesses, table: FoundTable, roles: Roles) -> None:
    """Add a table with one row for each item, or user, to the features if a night can read it."""
    for entity in ("item", "user"):
        role: Role = "item" if entity == "item" else "user"
        if (name := roles.columns.get(role)) is None or role in roles.guessed:
            continue
        if len(table.columns) == 2 and "vector" in table.columns.values():
            guesses.notes.append(
                f"{table.title} looks like vectors of {entity}s, and is not used: `larder import vectors` makes a "
                "folder of vectors"
            )
            return
        title, interactions_column = (
            f"{table.title} looks like features of {entity}s",
            guesses.columns.get(role),
        )
        if table.format != "parquet":
            remark = (
                "features are read from Parquet: convert it (pandas: read_csv(...).to_parquet(...))"
            )
        elif (
            interactions_column is not None
            and name != interactions_column
            and interactions_column not in table.columns
        ):
            remark = (
                f"its ids are in {name!r}, those of the interactions in {interactions_column!r}: "
                "give both the same name"
            )
        elif not are_unique(table, name if interactions_column is None else interactions_column):
            remark = "some ids come twice: only one row of each would count"
        elif len(table.files) > 1:
            remark = f"it is {len(table.files)} files: make it one"
        elif entity in guesses.features:
            remark = f"{guesses.features[entity].title} is used: join the two"
        else:
            guesses.features[entity] = table
            if role == "item":
                guesses.category = roles.columns.get("category")
            return
        guesses.notes.append(f"{title}, and is not used: {remark}")
        return
    guesses.notes.append(
        f"{table.title} is not used: neither users nor items were recognised in it"
    )


def _no_times(column: Any) -> str | None:
    """Return the reason why a night cannot read a column's times; None if it can."""
    kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_null(kind):
        return None
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        if (pc.mean(pc.greater(column, MILLISECONDS_FROM)).as_py() or 0) > 0.5:
            return (
                "holds milliseconds or less since 1970, where seconds are read: it is left out; divide it, or write it "
                "as a timestamp"
            )
        return None
    from precompute.sources.times import parse_time_texts

    _, readable, missing = parse_time_texts(column.combine_chunks())
    if (readable | missing).mean() < TIMES_LEAST:
        return "holds texts that are no times (ISO 8601 is read): it is left out; write it as a timestamp"
    return None


def _about_weight(table: FoundTable, name: str) -> list[str]:
    values = table.sample[name]
    remark = f"rows with {name!r} above 0 are interactions, all alike: 5 is no more than 1"
    if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)) or not len(
        values
    ):
        return [remark]
    nonpositive_count = pc.sum(pc.less_equal(values, 0)).as_py() or 0
    nonpositive_share_text = (
        f" ({nonpositive_count / len(values):.0%} of the first rows are not)"
        if nonpositive_count
        else ""
    )
    low = "; low ratings count like high ones, so leave bad ones out of the file, or make them 0"
    is_rating = normalise_name(name) in ("rating", "ratings", "score", "stars", "overall")
    return [f"{remark}{nonpositive_share_text}{low if is_rating else ''}"]
