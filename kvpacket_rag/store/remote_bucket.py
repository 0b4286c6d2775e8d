"""Objects below a URL: written whole or not at all, read with retries, and errors that say what is wrong."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from kvpacket_rag.errors import MissingExtraError, StoreError, StoreFormatError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_FOLDER = "file://"
_DOWNLOADS = 3  # attempts at a whole object; each request has retries of its own
_FIRST_PAUSE_SECONDS = 0.2
_PIECE_BYTES = 8 * 2**20
_CREDENTIALS = ("169.254.169.254", "metadata.google", "credential", "Missing", "must be specified")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # one without TLS is meant if it is named


def is_url(place: object) -> TypeGuard[str]:
    """Whether a place for packets is a URL such as ``s3://bucket/packets``, and no folder."""
    return isinstance(place, str) and _URL.match(place) is not None


class Bucket:
    """Objects by key below a URL, through obstore: S3, Google Cloud, Azure, a folder, or memory for tests.

    An object is put in one request, so nobody ever sees a part of it. A request that fails on the way is sent
    again with growing pauses; where the store stays away, further requests fail at once for a while, so that prompts
    are answered from text instead of each waiting in vain.

    Args:
        url: such as ``s3://bucket/prefix``, ``gs://…``, ``az://account/container/…`` or ``file:///folder``; access
            keys, region and endpoint come from the environment (``AWS_…``, ``GOOGLE_…``, ``AZURE_…``).
        timeout_seconds: of silence, after which a transfer counts as broken.
        max_retries: of one request.
        pause_seconds: how long nothing is asked of a store that did not answer.
        create: make the folder of a ``file://`` URL that is not there.
        backend: an object store of obstore's, in place of the one the URL names.

    Raises:
        MissingExtraError: obstore is not installed.
        StoreError: the URL is none, or its store cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 60.0,
        max_retries: int = 5,
        pause_seconds: float = 10.0,
        create: bool = True,
        backend: Any = None,
    ) -> None:
        self.url = url if url.rstrip("/").endswith(":") else url.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._pause_seconds = pause_seconds
        self._away_until = 0.0
        self._lock = threading.Lock()
        self._obstore = _obstore()
        self._backend = backend if backend is not None else self._open(max_retries, create)

    def create(self, key: str, parts: Sequence[bytes | memoryview]) -> bool:
        """Put an object unless there is one; whether there was none.

        Raises:
            StoreError: it could not be put; nothing can be seen of it.
        """

        def put() -> bool:
            try:
                self._obstore.put(self._backend, key, list(parts), mode="create", use_multipart=False)
            except self._obstore.exceptions.AlreadyExistsError:  # by us, too, if only the reply was lost
                return False
            return True

        return self._do(f"write {key}", put)

    def overwrite(self, key: str, content: bytes) -> None:
        """Put an object in place of another."""
        self._do(f"write {key}", lambda: self._obstore.put(self._backend, key, content, use_multipart=False))

    def read(self, key: str, max_bytes: int) -> bytes | None:
        """A small object, or None where there is none.

        Raises:
            StoreFormatError: it is larger than that; nothing of it is held.
            StoreError: it could not be read.
        """

        def got() -> bytes:
            found = self._get(key)
            if (size_bytes := int(found.meta["size"])) > max_bytes:
                raise StoreFormatError(f"{key} in {self.url} has {size_bytes:,} bytes; expected up to {max_bytes:,}")
            return bytes(found.bytes())

        with suppress(FileNotFoundError):
            return self._do(f"read {key}", got, may_be_missing=True)
        return None

    def size(self, key: str) -> int:
        """Bytes of an object; 0 where there is none."""
        with suppress(FileNotFoundError):
            found = self._do(f"look at {key}", lambda: self._obstore.head(self._backend, key), may_be_missing=True)
            return int(found["size"])
        return 0

    def download(self, key: str, path: Path) -> int | None:
        """Copy an object to a file, piece by piece; its bytes, or None where there is none.

        Raises:
            StoreError: the transfer broke off every time.
        """
        broken: Exception | None = None
        for attempt in range(_DOWNLOADS):
            if broken is not None:
                time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
            try:
                found = self._do(f"read {key}", lambda: self._get(key), may_be_missing=True)
                return _copy(found, path)
            except FileNotFoundError:
                return None
            except (self._obstore.exceptions.BaseError, _BrokenOffError) as error:
                broken = error
        told = self._explained(broken)[0] if broken else ""
        raise StoreError(f"cannot read {key} in {self.url}: it broke off {_DOWNLOADS} times; {told}") from broken

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Key and bytes of every object whose key begins with a folder's name."""
        pages = self._do(f"list {prefix}", lambda: self._obstore.list(self._backend, prefix, chunk_size=1000))
        while page := self._do(f"list {prefix}", lambda: next(pages, None)):
            for found in page:
                yield found["path"], found["size"]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; one that is not there is no error."""
        names = list(keys)

        def remove(chosen: str | list[str]) -> None:
            self._obstore.delete(self._backend, chosen)

        try:
            if names:
                self._do(f"delete {names[0]}", lambda: remove(names), may_be_missing=True)
        except FileNotFoundError:  # of some stores, which do not say which one
            for name in names:
                with suppress(FileNotFoundError):
                    self._do(f"delete {name}", partial(remove, name), may_be_missing=True)

    def move(self, key: str, target: str) -> None:
        """Give an object another key; nothing where it is gone already."""

        with suppress(FileNotFoundError):
            self._do(f"move {key}", lambda: self._obstore.rename(self._backend, key, target), may_be_missing=True)

    def probe(self) -> None:
        """See that the store answers and lets us in.

        Raises:
            StoreError: no credentials, no bucket, or no answer.
        """
        next(self.list("chunks/"), None)

    def _get(self, key: str) -> Any:
        return self._obstore.get(self._backend, key)

    def _do(self, doing: str, action: Callable[[], T], may_be_missing: bool = False) -> T:
        """What ``action`` gives, its errors translated; but FileNotFoundError where an object may be missing."""
        if (left := self._away_until - time.monotonic()) > 0:
            raise StoreError(f"cannot {doing} in {self.url}: it did not answer and is asked again in {left:.0f} s")
        try:
            return action()
        except (self._obstore.exceptions.BaseError, OSError) as error:
            if may_be_missing and isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                raise
            told, is_away = self._explained(error)
            if is_away:
                with self._lock:
                    self._away_until = time.monotonic() + self._pause_seconds
            raise StoreError(f"cannot {doing} in {self.url}: {told}") from error

    def _explained(self, error: Exception) -> tuple[str, bool]:
        """What an error means and what to do about it, and whether the store did not answer at all."""
        kinds, said = self._obstore.exceptions, _said(error)
        if isinstance(error, FileNotFoundError) or "NoSuchBucket" in said:
            return f"there is no such bucket or folder ({said}); create it first", False
        if "Unable to recognise URL" in said:
            return f"it names no object store ({said}); expected s3://, gs://, az:// or file:///", False
        if self.url.startswith(_FOLDER) and ("(os error" in said or "canonicalize" in said):
            return f"that is no folder, or is gone ({said}); mount it, create it, or name another", False
        if any(word in said for word in _CREDENTIALS):
            return f"no credentials were found ({said}); {_how_to_sign_in(self.url)}", False
        refused = (kinds.PermissionDeniedError, kinds.UnauthenticatedError)
        if isinstance(error, refused) or " 403 " in said or " 401 " in said:
            return f"the credentials are refused or do not allow it ({said}); check keys and policy", False
        if "TimedOut" in str(error):
            limit = f"nothing came for {self._timeout_seconds:g} s"
            return f"{limit} ({said}); check the network, or raise timeout_seconds", True
        return f"it does not answer as it should ({said}); check the network and the endpoint", True

    def _open(self, max_retries: int, create: bool) -> Any:
        if not is_url(self.url):
            raise StoreError(f"{self.url!r} is no URL; expected one such as s3://bucket/packets")
        if self.url.startswith(_FOLDER):
            if not self.url.removeprefix(_FOLDER).strip("/"):
                raise StoreError(f"{self.url!r} names no folder; expected one such as file:///srv/packets")
            return self._do("open a store", lambda: self._obstore.store.from_url(self.url, mkdir=create))
        retry: RetryConfig = {
            "max_retries": max_retries,
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
            "retry_timeout": timedelta(seconds=max(self._timeout_seconds, 10.0)),
        }
        client: ClientConfig = {
            "connect_timeout": timedelta(seconds=5),
            "read_timeout": timedelta(seconds=self._timeout_seconds),
            "timeout": timedelta(hours=1),  # silence is what counts, not the length of a transfer
            "allow_http": any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS),
        }
        options: dict[str, Any] = {"retry_config": retry, "client_options": client}
        return self._do("open a store", lambda: self._obstore.store.from_url(self.url, **options))


class _BrokenOffError(Exception):
    """A transfer ended before the object did."""


def _copy(found: Any, path: Path) -> int:
    expected, copied = int(found.meta["size"]), 0
    try:
        with open(path, "wb") as file:
            for piece in found.stream(min_chunk_size=_PIECE_BYTES):
                file.write(piece)
                copied += len(piece)
    except OSError as error:
        raise StoreError(f"what comes in cannot be written to {str(path)!r}: {error}; free some room") from error
    if copied != expected:
        raise _BrokenOffError(f"{copied} of {expected} bytes came")
    return copied


def _said(error: Exception) -> str:
    """The first lines of an error, and of a reply in XML its code alone."""
    head, _, reply = str(error).partition("\n\nDebug source")[0].partition("<?xml")
    code = re.search(r"<Code>(\w+)</Code>", reply)
    return head.strip().rstrip(":") + (f": {code[1]}" if code else "")


def _how_to_sign_in(url: str) -> str:
    match url.partition(":")[0].lower():
        case "gs":
            return "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account"
        case "az" | "azure" | "abfs" | "abfss" | "adl":
            return "set AZURE_STORAGE_ACCOUNT_KEY, or the id and secret of an application"
    return "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION"


def _obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MissingExtraError(
            "packets in an object store need obstore, which is not installed; run pip install 'kvpacket-rag[remote]'"
        ) from error
    return obstore
