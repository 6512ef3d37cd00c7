"""A server that sets up connections as Redis does, and answers every other command as a test says."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SETUP = (b"CLIENT", b"SELECT", b"AUTH")
ABSURD = (
    b"*100000000\r\n",
    b"~100000000\r\n",
    b">100000000\r\n",
    b"%100000000\r\n",
    b"|100000000\r\n",
    b"*2\r\n:1\r\n*100000000\r\n",
    b"*1\r\n*1\r\n~100000000\r\n",
    b"*0000000000000000100000000\r\n:1\r\n*100000000\r\n",
    b"*99999999999999999999999\r\n",
    b"+OK\r\n*100000000\r\n",
)
"""Replies that announce more elements than anybody asks for."""


@contextmanager
def forged_redis(reply: bytes, *, is_split: bool = False) -> Iterator[int]:
    """Run a server that answers commands with `reply`, one byte per segment if `is_split`; yield its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    stop_event = threading.Event()
    open_sockets: list[socket.socket] = []

    def answer(connected: socket.socket) -> None:
        try:
            while command := connected.recv(65_536):
                if any(setup_command in command for setup_command in SETUP):
                    connected.sendall(b"+OK\r\n" * command.count(b"*"))
                    continue
                for at in range(0, len(reply), 1 if is_split else len(reply)):
                    connected.sendall(reply[at : at + 1] if is_split else reply)
        except OSError:
            pass
        finally:
            connected.close()

    def accept() -> None:
        while not stop_event.is_set():
            try:
                connected, _ = listening.accept()
            except OSError:
                return
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            open_sockets.append(connected)
            threading.Thread(target=answer, args=(connected,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listening.getsockname()[1]
    finally:
        stop_event.set()
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for connected in open_sockets:
            connected.close()
        accepting.join(5)
