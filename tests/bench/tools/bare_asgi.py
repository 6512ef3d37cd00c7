"""The floor of HTTP: a raw ASGI app that sends the bytes of one file, on the service's own server and settings."""

import argparse
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn

Message = MutableMapping[str, Any]


def app_of(body: bytes) -> Callable[..., Awaitable[None]]:
    """Return an app that ignores the request."""
    start: Message = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")],
    }
    end: Message = {"type": "http.response.body", "body": body}

    async def app(scope: Message, receive: object, send: Callable[[Message], Awaitable[None]]) -> None:
        if scope["type"] == "http":
            await send(start)
            await send(end)

    return app


def serve(app: Any, app_name: str) -> None:
    """Serve an application as the service serves its own, until told to stop; prints the URL first."""
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"{app_name} app on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, loop="uvloop", http="httptools", lifespan="off", access_log=False, log_level="warning")
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Serve the bytes of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("body", type=Path, help="file with the bytes to send")
    serve(app_of(parser.parse_args().body.read_bytes()), "bare")


if __name__ == "__main__":
    main()
