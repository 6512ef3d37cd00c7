"""Worker process: serves on its parent's socket, and ends when the parent ends. Started only by `supervisor`."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from cache.errors import ConfigError, LarderError
from cache.process.command_line import interrupts_never_swallowed, printable_lines
from serving.app import create_app, make_server
from serving.config.settings import ServingConfig
from serving.metrics.exposition import WorkerPeers
from serving.process.log_setup import configure_for
from serving.process.server import Server
from serving.process.supervisor import READY_MESSAGE


def main(arguments: Sequence[str]) -> int:
    """Run a worker; arguments: listening and control descriptor, folder, slot, log level. Return 2 for bad settings."""
    listener, control_socket = (socket.socket(fileno=int(descriptor)) for descriptor in arguments[:2])
    workers_folder, slot, log_level = Path(arguments[2]), int(arguments[3]), arguments[4]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = ServingConfig.load(os.environ)
        configure_for(config, log_level, worker_slot=slot)
        app = create_app(config, WorkerPeers(workers_folder, slot))

        def announce() -> None:
            control_socket.setblocking(False)
            asyncio.get_running_loop().add_reader(control_socket, _follow_parent, server, control_socket)
            with contextlib.suppress(OSError):
                control_socket.send(READY_MESSAGE)

        server = make_server(app, config, log_level, announce)
        with interrupts_never_swallowed():
            server.run(sockets=[listener])
        if not server.started:
            raise ConfigError("the worker could not start; the log says why")
    except LarderError as error:
        print(printable_lines(f"larder: {error.message}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _follow_parent(server: Server, control_socket: socket.socket) -> None:
    try:
        parent_message = control_socket.recv(64)
    except OSError:
        parent_message = b""
    if parent_message:
        server.retire()
    else:  # without a parent no process could restart or stop this one
        asyncio.get_running_loop().remove_reader(control_socket)
        server.handle_exit(signal.SIGTERM, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
