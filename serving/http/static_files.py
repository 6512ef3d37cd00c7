"""Static pages and their files, sent with strict headers."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

from fastapi import Request, Response
from starlette.responses import RedirectResponse
from starlette.routing import Route

_INDEX_FILE_NAME = "index.html"
_MEDIA_TYPE_BY_SUFFIX = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # cached, but revalidated each time, so that upgrades are visible immediately
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class Asset:
    """File of a page as it is sent."""

    asset_bytes: bytes
    media_type: str
    etag: str


@dataclass(frozen=True, slots=True)
class StaticPage:
    """Page at a path, and its files below that path, from a folder in a package."""

    url_path: str
    package_name: str
    package_folder: str

    def assets(self) -> Mapping[str, Asset]:
        """Return every file of the page by path, read once."""
        return _read_assets(self)

    def routes(self) -> list[Route]:
        """Return one route per file; other names are not found. The files contain no data, so they need no token."""
        routes = [
            Route(path, functools.partial(_send_asset, asset), include_in_schema=False)
            for path, asset in sorted(self.assets().items())
        ]
        return [
            *routes,
            Route(
                f"{self.url_path}/", functools.partial(_redirect_without_slash, self.url_path), include_in_schema=False
            ),
        ]  # fmt: skip


@functools.cache
def _read_assets(page: StaticPage) -> Mapping[str, Asset]:
    asset_by_path = {}
    for file in files(page.package_name).joinpath(page.package_folder).iterdir():
        if (media_type := _MEDIA_TYPE_BY_SUFFIX.get(PurePosixPath(file.name).suffix)) is not None:
            body = file.read_bytes()
            path = page.url_path if file.name == _INDEX_FILE_NAME else f"{page.url_path}/{file.name}"
            asset_by_path[path] = Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return asset_by_path


async def _send_asset(asset: Asset, request: Request) -> Response:
    headers = {**PAGE_HEADERS, "ETag": asset.etag}
    if _matches_etag(request.headers.get("if-none-match", ""), asset.etag):
        return Response(None, 304, headers)
    if request.method == "HEAD":
        headers |= {"Content-Length": str(len(asset.asset_bytes))}
        return Response(None, 200, headers, asset.media_type)
    return Response(asset.asset_bytes, 200, headers, asset.media_type)


async def _redirect_without_slash(url_path: str, _request: Request) -> Response:
    return RedirectResponse(f"..{url_path}", 308)


def _matches_etag(if_none_match: str, etag: str) -> bool:
    """True if If-None-Match matches (RFC 9110, 13.1.2): a list of tags compared weakly, or any."""
    return any(tag.strip().removeprefix("W/") in (etag, "*") for tag in if_none_match.split(","))
