"""Object store behind a URL, through its fsspec driver: exclusive creation, its test, and conversion of errors."""

import contextlib
import functools
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec

from cache.errors import StoreError

PROBE_OBJECT_NAME = ".created-once"
"""Name of the probe object: a store that refuses to create it a second time supports exclusive creation."""

_ERROR_TEXT_CHARS_MAX = 500
_HIDDEN_MARK = "***"
_HIDDEN_NAMES_PATTERN = r"(?:key|secret|token|password|passwd|signature|\bsig|credentials?|authorization|sas)"
_SECRET_OPTION_PATTERN = re.compile(f"{_HIDDEN_NAMES_PATTERN}|connection_string", re.IGNORECASE)
_SECRET_REPLACEMENTS = (
    (re.compile(r"(://)[^/@\s]+@"), rf"\1{_HIDDEN_MARK}@"),
    (re.compile(r"\?[^\s?'\"<>]*=[^\s'\"<>]*"), f"?{_HIDDEN_MARK}"),  # a signed address
    (re.compile(r"\b(bearer|basic)\s+\S+", re.IGNORECASE), rf"\1 {_HIDDEN_MARK}"),
    (
        re.compile(rf"({_HIDDEN_NAMES_PATTERN}\w*['\"]?\s*[=:]\s*['\"]?)(?!bearer|basic)[^\s'\",;&)]+", re.IGNORECASE),
        rf"\1{_HIDDEN_MARK}",
    ),
)


class ObjectStore:
    """Objects under one URL. Reads bypass listing caches; a missing object raises FileNotFoundError."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.display_url = without_secrets(url)
        self._file_system: Any = None

    def _driver_and_url(self, path: str) -> tuple[Any, str]:
        if self._file_system is None:
            try:
                self._file_system = fsspec.url_to_fs(self.url)[0]
            except Exception as error:
                raise self._store_error(f"cannot open the artefact store {self.display_url}", error) from (
                    self._cause(error)
                )
        self._file_system.invalidate_cache()
        return self._file_system, f"{self.url}/{path}".rstrip("/")

    @contextlib.contextmanager
    def _translate_errors(self, operation: str, *, may_be_absent: bool = False) -> Iterator[None]:
        """Convert drivers' own errors (botocore's, gcsfs', Azure's), which are not OSErrors, to StoreError."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            if may_be_absent and isinstance(error, FileNotFoundError):
                raise
            raise self._store_error(f"cannot {operation}", error) from self._cause(error)

    def _store_error(self, failure_message: str, error: BaseException) -> StoreError:
        error_text = " ".join(without_secrets(str(error), self._secret_options()).split())[:_ERROR_TEXT_CHARS_MAX]
        error_name = "" if isinstance(error, OSError) and error_text else f"{type(error).__name__}: "
        return StoreError(f"{failure_message}: {error_name}{error_text}".rstrip(": "))

    def _cause(self, error: BaseException) -> BaseException | None:
        """Return the driver's error as the cause for tracebacks; None if it, or its context, contains a secret."""
        chained_error: BaseException | None = error
        while chained_error is not None:
            if without_secrets(str(chained_error), self._secret_options()) != str(chained_error):
                return None
            chained_error = chained_error.__cause__ or chained_error.__context__
        return error

    def _secret_options(self) -> list[str]:
        options = getattr(self._file_system, "storage_options", None) or {}
        return [
            str(option_value)
            for option_name, option_value in options.items()
            if option_value and _SECRET_OPTION_PATTERN.search(option_name)
        ]

    def read(self, path: str) -> bytes:
        """Read a small object."""
        with self._translate_errors(f"read {path} in {self.display_url}", may_be_absent=True):
            fs, url = self._driver_and_url(path)
            content: bytes = fs.cat_file(url)
        return content

    def read_many(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Read objects; return those that exist, by path. A driver that supports it reads many at once."""
        if not paths:
            return {}
        with self._translate_errors(f"read {paths[0]} and {len(paths) - 1} others in {self.display_url}"):
            fs, _ = self._driver_and_url("")
            urls = [f"{self.url}/{path}" for path in paths]
            reply_by_url: dict[str, Any] = fs.cat(urls, on_error="return")
            data_by_path = {}
            for path, url in zip(paths, urls, strict=True):
                reply = reply_by_url.get(fs._strip_protocol(url))
                if reply is None:  # a driver that returns other names or leaves some out: read one by one
                    with contextlib.suppress(FileNotFoundError):
                        reply = fs.cat_file(url)
                if isinstance(reply, bytes):
                    data_by_path[path] = reply
                elif isinstance(reply, Exception) and not isinstance(reply, FileNotFoundError):
                    raise reply
        return data_by_path

    def write(self, path: str, content: bytes) -> None:
        """Create or replace an object."""
        with self._translate_errors(f"write {path} in {self.display_url}"):
            fs, url = self._driver_and_url(path)
            fs.pipe_file(url, content)

    def create(self, path: str, content: bytes) -> bool:
        """Create an object; return False if it exists. Raise StoreError if the store cannot create exclusively."""
        demand_exclusive(self.url)
        return self._create(path, content)

    def _create(self, path: str, content: bytes) -> bool:
        location = f"{path} in {self.display_url}"
        try:
            with self._translate_errors(f"write {location}"):
                fs, url = self._driver_and_url(path)
                try:
                    fs.pipe_file(url, content, mode="create")
                except FileExistsError:
                    return False
        except StoreError:
            # A refusal may be reported as another error (EINVAL of s3fs); a success whose reply was lost as any error.
            with contextlib.suppress(StoreError, FileNotFoundError):
                return self.read(path) == content
            raise
        try:
            is_same_data = self.read(path) == content
        except FileNotFoundError:
            is_same_data = False
        if not is_same_data:
            raise self._not_exclusive(f"{location} does not have the content that was just written")
        return True

    def _not_exclusive(self, probe_finding: str) -> StoreError:
        driver = type(self._file_system)
        return StoreError(
            f"{probe_finding}: this store, or its driver {driver.__module__}.{driver.__name__}, "
            f"does not create objects "
            "exclusively, so one release could overwrite another. Use AWS S3 (botocore 1.36 or newer), Google Cloud "
            "Storage, Azure Blob Storage, another store that honours If-None-Match on writes, or a shared folder",
            reason="not_exclusive",
        )

    def names(self, path: str) -> list[str]:
        """Return the names of the objects and folders in a folder."""
        with self._translate_errors(f"list {path} in {self.display_url}", may_be_absent=True):
            fs, url = self._driver_and_url(path)
            return [name.rstrip("/").rsplit("/", 1)[-1] for name in fs.ls(url, detail=False)]

    def delete(self, path: str) -> None:
        """Remove an object, or all objects below a folder."""
        with self._translate_errors(f"delete {path} in {self.display_url}", may_be_absent=True):
            fs, url = self._driver_and_url(path)
            fs.rm(url, recursive=True)

    def get(self, path: str, target_path: Path) -> None:
        """Download an object."""
        with self._translate_errors(f"fetch {path} from {self.display_url}", may_be_absent=True):
            fs, url = self._driver_and_url(path)
            fs.get_file(url, str(target_path))

    def put(self, source_path: Path, path: str) -> None:
        """Upload an object."""
        with self._translate_errors(f"write {path} to {self.display_url}"):
            fs, url = self._driver_and_url(path)
            fs.put_file(str(source_path), url)


@functools.cache
def demand_exclusive(url: str) -> None:
    """Raise StoreError unless the store refuses to create an existing object; tested once per process and store.

    A store that ignores the condition would silently let the last of two writers of a release record win.
    """
    store = ObjectStore(url)
    if store._create(PROBE_OBJECT_NAME, _random_content()) and store._create(PROBE_OBJECT_NAME, _random_content()):
        raise store._not_exclusive(f"{PROBE_OBJECT_NAME} in {store.display_url} could be created twice")


def _random_content() -> bytes:
    return secrets.token_hex(16).encode()


def without_secrets(text: str, known_secrets: Sequence[str] = ()) -> str:
    """Mask passwords, keys, tokens and signed queries in the text, and all `known_secrets`."""
    for secret in known_secrets:
        text = text.replace(secret, _HIDDEN_MARK)
    for pattern, replacement in _SECRET_REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return text
