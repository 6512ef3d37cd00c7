"""A probe's reply, as it comes in, and a watch that meets an error."""

import logging
import math
from typing import Any

import pytest

from cache.control.control_keys import Control
from cache.format.redis_keys import Keyspace
from precompute.bulk.watch import Watcher, is_complete_reply
from tests.polling import poll_until


@pytest.mark.parametrize("value", [b"", b"hello", b"a\r\nb", b"x" * 512])
def test_a_reply_is_whole_only_with_its_last_byte(value):
    reply = b"$%d\r\n%b\r\n" % (len(value), value)

    assert not any(is_complete_reply(reply[:end]) for end in range(len(reply)))
    assert is_complete_reply(reply)


@pytest.mark.parametrize("reply", [b"-NOPERM no\r\n", b":1\r\n", b"_\r\n", b"$x\r\n\r\n"])
def test_what_is_no_bulk_string_is_said_to_be_none(reply):
    with pytest.raises(ValueError):
        is_complete_reply(reply)


def test_a_watch_that_meets_an_unexpected_error_tells_it_in_a_sentence_and_goes_on(caplog):
    no_client: Any = object()
    with caplog.at_level(logging.WARNING, "precompute.bulk.watch"):
        watcher = Watcher(Control(no_client, Keyspace("test")), probe_interval_ms=1.0)
        heard: list[float] = []

        def has_met_it() -> bool:
            heard.extend(watcher.take_round_trips_s())
            return bool(heard)

        assert poll_until(has_met_it)
        watcher.close()

    assert heard == [math.inf]
    (record,) = caplog.records
    assert record.getMessage().startswith("the watch over readers starts again, after AttributeError(")
    assert record.exc_info is None
