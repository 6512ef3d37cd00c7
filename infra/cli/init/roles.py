"""Roles of columns, by the names that data sets give them and by their types. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["integer", "float", "text", "time", "vector", "other"]
"""Kind of a column's values; a vector is a list of numbers with a fraction."""
Role = Literal["user", "item", "timestamp", "weight", "category"]

_NAMES: Final[Mapping[Role, tuple[str, ...]]] = {
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
"""Role -> names without case, underscores and the like; the first is the surest."""

_MOMENT: Final = re.compile(r"([\W_](at|ts|date|timestamp)|[a-z](At|Date|Timestamp))$")
"""End of a name of several words that tells when something happened: `ordered_at`, `viewDate`."""

_NUMBERED: Final = re.compile(r"(no|nr|num|number|code|key)$")

FITS: Final[Mapping[Role, tuple[Kind, ...]]] = {
    "user": ("integer", "text"),
    "item": ("integer", "text"),
    "timestamp": ("time", "integer", "float", "text"),
    "weight": ("integer", "float", "text"),
    "category": ("text", "integer"),
}
"""Role -> kinds that a night can read in it."""


_NO_ID: Final = frozenset(
    {
        "", "index", "id", "unnamed0", "title", "name", "description", "text", "comment", "review", "url", "image",
        "price", "country", "city", "gender", "sex", "age", "device", "event", "eventtype", "action", "language",
        "year",
    }
)  # fmt: skip
"""Names of columns that are never taken for ids because no other is left."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Column of each role that was recognised, and remarks about those that only seem to have one."""

    columns: Mapping[Role, str]
    guessed: tuple[Role, ...] = ()
    """Roles that no name told: the one column that was left."""
    unfit: Mapping[Role, str] = field(default_factory=dict)
    """Column of ids that is called like a role which has no other column, though a night refuses its values."""
    remarks: tuple[str, ...] = ()


def normalise_name(name: str) -> str:
    """A name without case and without what is no letter or digit."""
    return re.sub(r"[\W_]", "", name.lower())


def roles_of(columns: Mapping[str, Kind]) -> Roles:
    """Roles of a table's columns: by exact name first, then by its end, and at last by what is left over."""
    column_by_role: dict[Role, str] = {}
    remarks: list[str] = []
    unfit: dict[Role, str] = {}
    for role, names in _NAMES.items():
        for name in _by_name(
            role, names, [column for column in columns if column not in column_by_role.values()]
        ):
            if columns[name] in FITS[role]:
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
    """Columns that may have a role, the surest first."""
    exact = [column for name in names for column in columns if normalise_name(column) == name]
    if role in ("user", "item"):
        # A number is an id as well: `customer_no`, `article_nr`.
        exact += [
            column
            for column in columns
            if column not in exact and _NUMBERED.sub("", normalise_name(column)) in names
        ]
        # Of several words: `src_user_id`, `clicked_article`.
        ends = tuple(role_name for role_name in names if len(role_name) > 3)
        exact += [
            column
            for column in columns
            if column not in exact and normalise_name(column).endswith(ends)
        ]
    if role == "timestamp":
        exact += [column for column in columns if column not in exact and _MOMENT.search(column)]
    return exact


def _like_an_id(name: str, kind: Kind) -> bool:
    normalised_name = normalise_name(name)
    is_other = any(normalised_name in _NAMES[role] for role in ("timestamp", "weight", "category"))
    return kind in FITS["user"] and not is_other and normalised_name not in _NO_ID


def unfit_in_words(role: Role, name: str, kind: Kind) -> str:
    """Remark on a column that is called like a role and holds values of a kind that a night cannot read in it."""
    remedy = "it is left out"
    if role in ("user", "item"):
        remedy = "ids are text or whole numbers: write the column so, with a row for each id"
    if role in ("user", "item") and kind == "float":
        remedy = (
            "ids are text or whole numbers (pandas makes floats of numbers where one is missing: make the column Int64 "
            "before it is written, so that CSV has 17850 in place of 17850.0)"
        )
    return f"column {name!r} looks like the {role}, but holds {kind} values: {remedy}"
