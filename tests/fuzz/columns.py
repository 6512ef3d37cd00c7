"""What a fuzzer calls: each function of the compiled columns, against its twin in Python.

Where both give a value, it has to be the same. Where the documents of the twin name an error, both have to raise it
(`IS_SAME_REFUSAL`). Where only what is compiled gives a value, it is compared with what its docstring says.
"""

from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import xxhash

from cache.format.records.layout import Layout
from cache.native import pure
from cache.native.number_text import DROPPED_BITS, Numerals
from tests.fuzz.given import Given

REFUSED = "refused"
_ERRORS = (ValueError, TypeError, OverflowError, IndexError, MemoryError, BufferError)
_numerals = Numerals()


class Different(AssertionError):
    """What is compiled, and its twin, give different results."""


def plain_value(value: Any) -> Any:
    """A value in which buffers are bytes."""
    if isinstance(value, tuple):
        return tuple(plain_value(part) for part in value)
    if isinstance(value, (list, int, str, bool)) or value is None:
        return value
    return bytes(value)


def result(function: Callable[..., Any], *arguments: Any) -> Any:
    """The value of a call, or REFUSED."""
    try:
        return plain_value(function(*arguments))
    except _ERRORS:
        return REFUSED


def compare(
    name: str, compiled: Any, twin: Any, *arguments: Any, is_same_refusal: bool = False
) -> None:
    """Fail if a call of both gives different values, or with `is_same_refusal` if only one of them raises."""
    mine, other = result(compiled, *arguments), result(twin, *arguments)
    if mine != other and (is_same_refusal or REFUSED not in (mine, other)):
        raise Different(f"{name}{arguments}: compiled {mine!r}, pure {other!r}")


def expect(name: str, got: Any, wanted: Any) -> None:
    """Fail unless a value is the one that the docstring says."""
    if got != wanted:
        raise Different(f"{name}: compiled {got!r}, by its docstring {wanted!r}")


def hashes(columns: ModuleType, given: Given) -> None:
    seed = given.number(0, 2**64 - 1)
    ids = given.texts(40, 160)
    if (mine := result(columns.hashes, ids, seed)) is not None:
        expect("hashes", mine, bytes(pure.hashes(ids, seed)))
    else:
        expect("hashes", any(len(name) > 128 for name in ids), True)


def cuts_of(given: Given, size: int) -> Any:
    """int32 cuts, sorted more often than not, in bytes that need not be aligned, or whole."""
    count = given.number(0, 12)
    cuts = given.array("<i4", count)
    if given.number(0, 3):
        cuts = np.sort(np.abs(cuts.astype(np.int64)) % (size + 1)).astype("<i4")
    return bytes(cuts.tobytes() + given.text(3))


def rising(cuts: bytes, size: int) -> list[int] | None:
    """The cuts, if they rise within a size."""
    numbers: list[int] = np.frombuffer(cuts[: len(cuts) // 4 * 4], "<i4").tolist()
    if (
        not numbers
        or numbers[0] < 0
        or numbers[-1] > size
        or any(a > b for a, b in pairwise(numbers))
    ):
        return None
    return numbers


def text_hashes(columns: ModuleType, given: Given) -> None:
    seed, data = given.number(0, 2**64 - 1), given.text(400)
    cuts = cuts_of(given, len(data))
    numbers = rising(cuts, len(data))
    wanted = None
    if numbers is not None and all(b - a <= 128 for a, b in pairwise(numbers)):
        texts = [data[a:b] for a, b in pairwise(numbers)]
        wanted = b"".join(xxhash.xxh3_64_intdigest(t, seed).to_bytes(8, "little") for t in texts)
    expect("text_hashes", result(columns.text_hashes, data, cuts, seed), wanted)


def is_text(data: bytes) -> bool:
    """Return True for UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def cut_texts(columns: ModuleType, given: Given) -> None:
    data = given.text(200)
    cuts = cuts_of(given, len(data))
    numbers = rising(cuts, len(data))
    texts = None if numbers is None else [data[a:b] for a, b in pairwise(numbers)]
    wanted = texts if texts is not None and all(map(is_text, texts)) else None
    expect("cut_texts", result(columns.cut_texts, data, cuts), wanted)


def joined(columns: ModuleType, given: Given) -> None:
    texts: list[Any] = list(given.texts(20, 40))
    if given.number(0, 7) == 0:
        texts.append(given.number(0, 9))
    wanted = None
    if all(isinstance(text, bytes) for text in texts):
        cuts = np.cumsum([0, *map(len, texts)]).astype("<i4").tobytes()
        wanted = (cuts, b"".join(texts))
    expect("joined", result(columns.joined, texts), wanted)


def replies(given: Given, count: int, length: int) -> bytes:
    """Bulk strings of one length, damaged or not."""
    data = b"".join(
        b"$%d\r\n%b\r\n" % (length, given.raw(length).ljust(length, b"x")) for _ in range(count)
    )
    data = data[: len(data) - given.number(0, 9)] if given.is_true() else data
    if given.is_true() and data:
        at = given.number(0, len(data) - 1)
        data = data[:at] + given.raw(1) + data[at + 1 :]
    return data


def could_be(columns: ModuleType, given: Given) -> None:
    length, made, asked = given.number(0, 40), given.number(0, 6), given.number(0, 8)
    data = replies(given, made, length) if given.number(0, 3) else given.text(200)
    compare("could_be", columns.could_be, pure.could_be, data, asked, length, is_same_refusal=True)
    result(columns.could_be, data, given.delicate(), given.delicate())


def records_of(columns: ModuleType, given: Given) -> None:
    count = given.number(0, 6)
    prints = given.array("<u8", count).tobytes()
    size, step, first = given.number(14, 40), given.number(14, 60), given.number(0, 20)
    record_format, is_odd = given.number(0, 15), given.number(0, 7) == 0
    if is_odd:
        size, step, first, count = (given.delicate() for _ in range(4))
    arguments = (given.rest(), first, step, count, size, prints, record_format)
    if is_odd:  # numpy itself ends the process for some of them
        result(columns.records_of, *arguments)
    else:
        compare("records_of", columns.records_of, pure.records_of, *arguments)


def spread(columns: ModuleType, given: Given) -> None:
    count, size = given.number(0, 12), given.number(1, 20)
    places = [
        given.number(0, 13) - 1 if given.number(0, 7) == 0 else given.number(0, 11)
        for _ in range(given.number(0, 8))
    ]
    rows = given.raw(len(places) * size).ljust(len(places) * size, b"\1")
    others = {
        given.number(0, 11): given.raw(size).ljust(size, b"\2") for _ in range(given.number(0, 4))
    }
    if given.number(0, 15) == 0:
        count, size = given.delicate(), given.delicate()
    if count * max(size, 0) > 2**63 - 1:
        expect("spread", result(columns.spread, count, size, rows, places, others), REFUSED)
    if count * max(size, 0) > 1 << 20:
        return  # there is memory for it, and it only takes long
    # Negative places count from the end in numpy; nobody sends them.
    if all(0 <= place < count for place in [*places, *others]):
        compare("spread", columns.spread, pure.spread, count, size, rows, places, others)
    elif result(columns.spread, count, size, rows, places, others) != REFUSED:
        raise Different(f"spread takes a place outside: {count} {places} {others}")


def flights(columns: ModuleType, given: Given) -> None:
    mine = dict.fromkeys(given.raw(given.number(0, 9)), 0)
    other = dict(mine)
    for _ in range(given.number(1, 4)):
        keys = list(given.raw(given.number(0, 9)))
        if given.is_true():
            expect("board", columns.board(mine, keys, 1), pure.board(other, keys, 1))
        else:
            columns.leave(mine, keys)
            pure.leave(other, keys)
        expect("flights", (mine, list(mine)), (other, list(other)))


def are_ids(columns: ModuleType, given: Given) -> None:
    ids: list[Any] = list(given.texts(10, 20))
    if given.number(0, 7) == 0:
        ids.append("text")
    compare(
        "are_ids", columns.are_ids, pure.are_ids, ids, given.number(0, 25), is_same_refusal=True
    )


def getranges(columns: ModuleType, given: Given) -> None:
    prefix, count = given.text(30), given.number(0, 6)
    pages, offsets = (
        np.array([given.delicate() for _ in range(count)], np.int64) for _ in range(2)
    )
    length = given.delicate()
    mine = result(columns.getranges, prefix, pages, offsets, length)
    is_sound = length > 0 and all(
        page >= 0 and 0 <= offset <= 2**63 - 1 - length
        for page, offset in zip(pages.tolist(), offsets.tolist(), strict=True)
    )
    wanted = pure.getranges(prefix, pages, offsets, length) if is_sound else REFUSED
    expect(f"getranges({prefix!r}, {pages}, {offsets}, {length})", mine, wanted)


def dots(columns: ModuleType, given: Given) -> None:
    dims, rows = given.number(1, 70), given.number(0, 12)
    vector, matrix = given.array("<f4", dims), given.array("<f4", dims * rows)
    is_odd = given.number(0, 3) == 0
    ordinals = np.array(
        [
            given.delicate() if is_odd else given.number(0, max(0, rows - 1))
            for _ in range(given.number(0, 9))
        ],
        np.int64,
    )
    mine = result(columns.dots, vector, matrix, ordinals)
    with np.errstate(all="ignore"):
        other = result(pure.dots, vector, matrix, ordinals)
        expect("dots refuses", mine == REFUSED, other == REFUSED)
        finite = np.concatenate([vector, matrix]).astype(np.float64)
        if mine == REFUSED or not (np.abs(finite) < 1e15).all():
            return
        one, chosen = (
            vector.astype(np.float64),
            matrix.reshape(rows, dims).astype(np.float64)[ordinals],
        )
        bound = dims * 2.0**-22 * (np.abs(chosen) @ np.abs(one)) + 1e-30
        close = np.abs(np.frombuffer(mine, np.float32) - chosen @ one) <= bound
    expect(f"dots({vector}, {matrix}, {ordinals})", close.all(), True)


def records(given: Given, *, is_list: bool) -> tuple[bytes, int, bool, int]:
    """(records, their width, whether their numbers are float16, how many there are); sometimes a byte too many."""
    width, is_half, count = given.number(1, 20), given.is_true(), given.number(0, 5)
    layout = Layout("topk" if is_list else "value", width, "f2" if is_half else "f4")
    rows = np.zeros(count, layout.dtype)
    for row in rows:
        row["count"] = given.number(0, width + 1)
        row["flags"], row["exponent"] = given.number(0, 255), given.number(-128, 127)
        numbers = given.array("<f2" if is_half else "<f4", width)
        row["numbers"] = (
            numbers if given.number(0, 3) == 0 else np.nan_to_num(numbers, posinf=1, neginf=-1)
        )
        if is_list:
            row["items"] = (
                given.array("<u4", width)
                if given.number(0, 7) == 0
                else given.array("u1", width) % 12
            )
    data = rows.tobytes() + (given.text(3) if given.number(0, 15) == 0 else b"")
    return data, width, is_half, count


def plain(columns: ModuleType, given: Given) -> None:
    is_list = given.is_true()
    data, width, is_half, _ = records(given, is_list=is_list)
    arguments = (
        given.number(0, 255), given.number(0, 255), given.number(0, 25), given.number(-128, 127),
        given.number(0, 15) if given.is_true() else given.number(0, 2**32 - 1),
    )  # fmt: skip
    with np.errstate(all="ignore"):
        compare(
            "plain", columns.plain, pure.plain, data, width, is_list, is_half, *arguments, is_same_refusal=True
        )  # fmt: skip
    result(columns.plain, data, given.delicate(), is_list, is_half, *arguments)


def are_finite(data: bytes, width: int, is_half: bool, *, is_list: bool) -> bool:
    """Return True if all numbers of all records are finite."""
    layout = Layout("topk" if is_list else "value", width, "f2" if is_half else "f4")
    if len(data) % layout.dtype.itemsize:
        return False
    return bool(np.isfinite(np.frombuffer(data, layout.dtype)["numbers"]).all())


def numbers(columns: ModuleType, given: Given) -> None:
    is_list = given.is_true()
    data, width, is_half, _ = records(given, is_list=is_list)
    k = given.number(1, width)
    if are_finite(data, width, is_half, is_list=is_list):
        with np.errstate(all="ignore"):
            compare(
                "numbers", columns.numbers, pure.numbers, data, width, is_list, is_half, k, is_same_refusal=True
            )  # fmt: skip
    result(columns.numbers, data, width, is_list, is_half, given.delicate())


def catalogue(given: Given) -> tuple[bytes, Any]:
    """The ids of a catalogue: their bytes, and uint64 offsets, sound more often than not."""
    texts = given.texts(12, 12)
    offsets = np.cumsum([0, *map(len, texts)]).astype("<u8")
    if given.number(0, 7) == 0 and len(offsets):
        offsets[given.number(0, len(offsets) - 1)] = given.delicate() & (2**64 - 1)
    return b"".join(texts), offsets[: len(offsets) - (given.number(0, 15) == 0)]


def names(columns: ModuleType, given: Given) -> None:
    data, width, is_half, count = records(given, is_list=True)
    ids, offsets = catalogue(given)
    k = given.number(1, width)
    mine = result(columns.names, data, width, is_half, k, ids, offsets)
    with np.errstate(all="ignore"):
        other = result(pure.names, data, width, is_half, k, ids, offsets)
    if mine != other and REFUSED not in (mine, other):
        raise Different(
            f"names({data!r}, {width}, {is_half}, {k}, {ids!r}, {offsets}): {mine!r}, {other!r}"
        )
    if count and mine != REFUSED and other == REFUSED:
        raise Different(
            f"names({data!r}, {width}, {is_half}, {k}, {ids!r}, {offsets}): {mine!r} is taken"
        )


def answers(columns: ModuleType, given: Given) -> None:
    data, width, is_half, count = records(given, is_list=True)
    ids, offsets = catalogue(given)
    k = given.number(1, width)
    head, middle, after, last = (given.text(6) for _ in range(4))
    people, ends = ([given.text(9) for _ in range(count)] for _ in range(2))
    if given.number(0, 15) == 0:
        people = people[:-1]
    arguments = (
        data,
        width,
        is_half,
        k,
        ids,
        offsets,
        _numerals.table,
        head,
        people,
        middle,
        after,
        last,
        ends,
    )
    mine = result(columns.answers, *arguments)
    is_finite = are_finite(data, width, is_half, is_list=True)
    if isinstance(mine, tuple) and is_finite:
        with np.errstate(all="ignore"):
            keys = [key for key in mine if np.isfinite(_number_of(key))]
            if keys:
                _numerals.write(keys)
        mine = result(columns.answers, *arguments)
    if not isinstance(mine, list) or not is_finite:
        return
    layout = Layout("topk", width, "f2" if is_half else "f4")
    rows = np.frombuffer(data, layout.dtype)
    with np.errstate(all="ignore"):
        scores = np.frombuffer(pure.numbers(data, width, True, is_half, k), np.float32).reshape(
            -1, k
        )
    for text, row, name, end, listed in zip(mine, rows, people, ends, scores, strict=True):
        bounds = offsets.tolist()
        items = b",".join(
            b'"%b"' % ids[bounds[o] : bounds[o + 1]] for o in row["items"][:k].tolist()
        )
        said = orjson.dumps(listed, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        expect("answers", text, b"".join((head, name, middle, items, after, said, last, end)))


def _number_of(key: int) -> np.float32:
    number: np.float32 = np.uint32(key << DROPPED_BITS).view(np.float32)
    return number


def stream(columns: ModuleType, given: Given) -> None:
    before, metadata, after = given.text(12), given.text(90), given.text(12)
    room = len(metadata) + 8
    is_odd = given.number(0, 7) == 0
    body_at, rows_at, nodes_at, buffers_at = (
        given.delicate() if is_odd else given.number(0, room) for _ in range(4)
    )
    rows = given.delicate()
    nodes = [given.delicate() for _ in range(given.number(0, 4))]
    buffers = given.texts(4, 20)
    mine = result(
        columns.stream, before, metadata, body_at, rows_at, nodes_at, buffers_at, rows, nodes, buffers, after
    )  # fmt: skip
    wanted: Any = REFUSED
    padded = [data + b"\0" * (-len(data) % 8) for data in buffers]
    numbers_at = [(body_at, sum(map(len, padded))), (rows_at, rows)]
    numbers_at += [(nodes_at + 8 * i, node) for i, node in enumerate(nodes)]
    start = 0
    for i, (data, full) in enumerate(zip(buffers, padded, strict=True)):
        numbers_at += [(buffers_at + 16 * i, start), (buffers_at + 16 * i + 8, len(data))]
        start += len(full)
    size = len(metadata)
    if all(0 <= at <= size - 8 for at, _ in numbers_at) and all(
        0 <= at <= size for at in (nodes_at, buffers_at)
    ):
        head = bytearray(metadata)
        for at, number in numbers_at:
            head[at : at + 8] = number.to_bytes(8, "little", signed=True)
        wanted = before + bytes(head) + b"".join(padded) + after
    expect("stream", mine, wanted)


def scanner(columns: ModuleType, given: Given) -> None:
    bounds = (
        (given.number(0, 40), given.number(0, 60))
        if given.number(0, 7)
        else (given.delicate(), given.delicate())
    )
    try:
        other = pure.ReplyScanner(*bounds)
    except ValueError:
        expect("ReplyScanner", result(columns.ReplyScanner, *bounds), REFUSED)
        return
    mine = columns.ReplyScanner(*bounds)
    while data := given.text(40):
        expect(f"admits {data!r}", mine.admits(data), other.admits(data))


def parts(columns: ModuleType, given: Given) -> None:
    count = given.number(1, 5)
    is_odd = given.number(0, 7) == 0
    values = np.unique(
        given.array("<u8", given.number(0, 24))
        % (given.number(1, 200) if given.is_true() else 2**64 - 1)
    )
    ends = sorted(given.number(0, len(values)) for _ in range(count - 1))
    pieces = [values[a:b].copy() for a, b in pairwise([0, *ends, len(values)])]
    firsts = [int(piece[0]) if len(piece) else (int(values[end]) if end < len(values) else 2**64 - 1)
              for piece, end in zip(pieces, [0, *ends], strict=True)]  # fmt: skip
    if is_odd:
        firsts = [given.number(0, 2**64 - 1) for _ in range(given.number(0, 6))]
    arguments = (tuple(firsts), tuple(pieces))
    try:
        mine = columns.HashParts(*arguments)
    except _ERRORS:
        return
    wanted = np.concatenate(
        [
            given.array("<u8", given.number(0, 8)),
            values[: given.number(0, 24)],
            given.array("u1", 9),
        ]
    )
    wanted = wanted.astype("<u8")
    found = result(mine.find, wanted)
    positions = np.array(
        [
            given.delicate() if given.number(0, 7) == 0 else given.number(0, 30)
            for _ in range(given.number(0, 9))
        ],
        np.int64,
    )
    pages = np.array([given.delicate() for _ in range(len(pieces))], np.int64)
    per_page, size = given.delicate(), given.delicate()
    if is_odd:
        result(mine.places, positions, pages, per_page, size)
        return
    other = pure.HashParts(*arguments)
    expect("find", found, result(other.find, wanted))
    if per_page > 0 and size > 0 and (pages >= 0).all():
        with np.errstate(all="ignore"):
            compare(
                "places", mine.places, other.places, positions, pages, per_page, size, is_same_refusal=True
            )  # fmt: skip
    else:
        result(mine.places, positions, pages, per_page, size)


TARGETS = (
    hashes, text_hashes, cut_texts, joined, could_be, records_of, spread, flights, are_ids, getranges, dots, plain,
    numbers, names, answers, stream, scanner, parts,
)  # fmt: skip


def target(columns: ModuleType) -> Callable[[bytes], None]:
    """The function that a fuzzer calls with bytes: the first says which function of the extension is tried."""

    def call(data: bytes) -> None:
        given = Given(data)
        TARGETS[given.number(0, len(TARGETS) - 1)](columns, given)

    return call
