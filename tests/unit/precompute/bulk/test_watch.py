"""A probe's reply, as it comes in."""

import pytest

from precompute.bulk.watch import is_whole


@pytest.mark.parametrize("value", [b"", b"hello", b"a\r\nb", b"x" * 512])
def test_a_reply_is_whole_only_with_its_last_byte(value):
    reply = b"$%d\r\n%b\r\n" % (len(value), value)

    assert not any(is_whole(reply[:end]) for end in range(len(reply)))
    assert is_whole(reply)


@pytest.mark.parametrize("reply", [b"-NOPERM no\r\n", b":1\r\n", b"_\r\n", b"$x\r\n\r\n"])
def test_what_is_no_bulk_string_is_said_to_be_none(reply):
    with pytest.raises(ValueError):
        is_whole(reply)
