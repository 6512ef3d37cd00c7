import os
import subprocess
import sys
from pathlib import Path

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.errors import TierUnavailable
from cache.format.redis_keys import Keyspace
from cache.l2.commands import (
    Command,
    LeaseMark,
    LeaseSwap,
    LeaseTake,
    Overlay,
    OverlayRead,
    OverlayWrite,
    Packer,
    PageRead,
    unpack,
)

KEYS = Keyspace("ns")


def parsed(packed: bytes) -> list[list[bytes]]:
    """What a server makes of the bytes."""
    reader = hiredis.Reader()
    reader.feed(packed)
    parsed_commands = []
    while (command := reader.gets()) is not False:
        parsed_commands.append(command)
    return parsed_commands


def test_commands_are_the_bytes_that_redis_expects() -> None:
    page, overlay = PageRead("g", "t", 12, 616, 616), OverlayRead("g", "t", "ff")
    write = OverlayWrite("g", "t", "ff", b"a\r\nb", 1.5)

    packed, count = Packer(KEYS).pack([page, overlay, write, page])

    read = [b"GETRANGE", b"larder:1:ns:g:g:t:12", b"616", b"1231"]
    name = b"larder:1:ns:w:g:t:ff"
    assert parsed(packed) == [read, [b"PTTL", name], [b"GET", name], [b"SET", name, b"a\r\nb", b"PX", b"1500"], read]
    assert count == 5


ids = st.text("abc:é{}", min_size=1, max_size=8)
commands = st.one_of(
    st.builds(PageRead, ids, ids, st.integers(0, 1 << 40), st.integers(0, 1 << 30), st.integers(1, 1 << 20)),
    st.builds(OverlayRead, ids, ids, ids),
    st.builds(
        OverlayWrite, ids, ids, ids, st.binary(max_size=99), st.floats(0, 1e6),
        st.none() | st.builds(LeaseMark, ids, st.binary(max_size=9)),
    ),
    st.builds(LeaseTake, ids, st.binary(max_size=9), st.integers(1, 9_999)),
    st.builds(LeaseSwap, ids, st.binary(max_size=9), st.binary(max_size=9), st.integers(1, 9_999)),
)  # fmt: skip


@given(st.lists(commands, max_size=12))
def test_whatever_is_asked_is_whole_commands_one_per_reply_and_no_write_without_expiry(asked: list[Command]) -> None:
    packed, count = Packer(KEYS).pack(asked)

    parsed_commands = parsed(packed)
    assert len(parsed_commands) == count
    for command in parsed_commands:
        assert command[0] in (b"GETRANGE", b"PTTL", b"GET", b"SET", b"EVAL")
        if command[0] == b"SET":
            assert command[-2] == b"PX" and int(command[-1]) > 0


def test_a_lease_is_taken_only_if_it_is_free_and_marked_with_the_answer_itself() -> None:
    key = KEYS.lease("g", "t", "ff", bytes(16))
    lease_take, lease_mark = LeaseTake(key, b"me/1", 100), LeaseMark(key, b"me/1")
    write = OverlayWrite("g", "t", "ff", b"payload", 1.5, lease_mark)

    packed, count = Packer(KEYS).pack([lease_take, write])

    name = b"larder:1:ns:w:g:t:ff:" + b"00" * 16
    assert parsed(packed) == [
        [b"SET", name, b"me/1", b"NX", b"GET", b"PX", b"100"],
        [b"SET", b"larder:1:ns:w:g:t:ff", b"payload", b"PX", b"1500"],
        [b"SET", name, b"done:me/1", b"PX", b"2000"],
    ]
    assert count == 3
    assert unpack([lease_take, write, lease_take], [None, b"OK", b"OK", b"other/1"]) == [None, None, b"other/1"]


def test_a_packer_remembers_no_more_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cache.l2.commands._CACHED_HEADS_MAX", 10)
    monkeypatch.setattr("cache.l2.commands._CACHED_TAILS_MAX", 10)
    packer = Packer(KEYS)

    for number in range(100):
        packed, _ = packer.pack([PageRead("g", "t", number, number * 7, 7)])
        assert parsed(packed)[0][1:] == [
            f"larder:1:ns:g:g:t:{number}".encode(), b"%d" % (number * 7), b"%d" % (number * 7 + 6)
        ]  # fmt: skip
        assert len(packer._getrange_heads) <= 10 and len(packer._getrange_tails) <= 10


def test_every_reply_becomes_the_answer_of_its_own_command() -> None:
    error = hiredis.ReplyError("WRONGTYPE")
    read, overlay = PageRead("g", "t", 0, 0, 4), OverlayRead("g", "t", "ff")
    command_batch: list[Command] = [read, overlay, read, overlay, read, overlay, overlay]

    answers = unpack(command_batch, [b"full", 1500, b"value", b"", -2, None, error, error, error, -1, b"for ever"])

    assert answers[:4] == [b"full", Overlay(b"value", 1.5), None, None]
    assert isinstance(answers[4], TierUnavailable) and isinstance(answers[5], TierUnavailable)
    assert answers[6] == Overlay(b"for ever", 0.0)


def test_two_processes_ask_for_the_same_keys_whatever_their_hash_seed() -> None:
    """Python's own `hash` differs between processes and may be part of nothing that is shared."""
    program = (
        "from cache.format.ids import *; from cache.format.redis_keys import *; from cache.l2.commands import *\n"
        "raw = canonical_id('ada')\n"
        "digest = input_digest('m', [b'x', b'y'], {'b': 1.5, 'a': 'z'})\n"
        "write = OverlayWrite('g', 't', hash_hex(hash_id(raw, 7)), digest, 60)\n"
        "print(Packer(Keyspace('ns')).pack([write]), fingerprint(raw))\n"
    )

    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[4],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }

    assert len(outputs) == 1
