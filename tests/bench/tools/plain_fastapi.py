"""What a hot route is held against: a plain FastAPI application, on the service's own server and settings.

`/prebuilt` sends the bytes of a file; `/redis/{name}` awaits one redis-py GET and sends what it finds.
"""

import argparse
from pathlib import Path

import redis.asyncio
from fastapi import FastAPI, Response

from tests.bench.tools.bare_asgi import serve


def app_of(body: bytes, redis_url: str) -> FastAPI:
    """Return an app with two ordinary routes."""
    app = FastAPI()
    client = redis.asyncio.Redis.from_url(redis_url, protocol=2, max_connections=64)

    @app.get("/prebuilt")
    async def prebuilt() -> Response:
        return Response(body, media_type="application/json")

    @app.get("/redis/{name}")
    async def read_redis(name: str) -> Response:
        return Response(await client.get(name), media_type="application/octet-stream")

    return app


def main() -> None:
    """Serve both routes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("body", type=Path, help="file with the bytes to send")
    parser.add_argument("redis_url")
    arguments = parser.parse_args()
    serve(app_of(arguments.body.read_bytes(), arguments.redis_url), "plain")


if __name__ == "__main__":
    main()
