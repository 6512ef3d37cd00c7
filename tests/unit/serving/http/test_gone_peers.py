"""A connection whose peer has closed it before it was accepted costs no more than its acceptance while others wait."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from serving.http.lookup_connection import has_peer_closed
from tests.polling import poll_until
from tests.unit.serving.http.test_connection import Connection, Front, Transport


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_peer_that_has_closed_its_side_is_seen_whatever_it_sent_before(is_closed: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as peer:
        peer.sendall(b"POST / HTTP/1.1\r\n")
        accepted, _ = listening.accept()
        if is_closed:
            peer.shutdown(socket.SHUT_WR)
        with accepted:
            transport = asyncio.Transport({"socket": accepted})
            assert poll_until(lambda: has_peer_closed(transport) == is_closed)


@pytest.mark.parametrize("is_backlogged", [False, True])
async def test_while_work_waits_a_connection_that_is_closed_already_is_not_read(
    monkeypatch: pytest.MonkeyPatch, is_backlogged: bool
) -> None:
    monkeypatch.setattr("serving.http.lookup_connection.has_peer_closed", lambda _transport: True)
    monkeypatch.setattr(Transport, "abort", Transport.close)
    front: Any = Front()
    drop_notes: list[bool] = []
    work = SimpleNamespace(is_backlogged=is_backlogged, note_dropped_connection=lambda: drop_notes.append(True))
    shed = {"gone": 0}
    front.gate = SimpleNamespace(admission=SimpleNamespace(work_pacer=work, shed_counts=shed))

    connection = Connection(front)

    assert connection.transport.is_closed == is_backlogged and shed["gone"] == is_backlogged
    assert bool(drop_notes) == is_backlogged
    connection.protocol.connection_lost(None)
