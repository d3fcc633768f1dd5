"""Where a dataset or an input lies: a folder, or a prefix in an object store (`s3://BUCKET/...`, `gs://BUCKET/...`).

What the writer, the parts and the readers need is here once for both: names, reading, putting a file in place so that
it appears whole, moving it away, listing, removing. `lease.py` has the lock.

Stores are reached by obstore: it has puts on condition, without which two writers could not be told apart, and it is
the library that polars reads stores by, so both take credentials from the same variables of the environment, and from
nowhere else: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, GOOGLE_SERVICE_ACCOUNT and so on;
AWS_ENDPOINT_URL names an S3 server other than Amazon's, GOOGLE_BASE_URL or the file of the service account one that is
not Google's.
"""

import io
import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeAlias

from spanmill.errors import ConfigError

_URL: Final = re.compile(r"(s3|gs)://[^/\s?#]+(/[^?#]*)?")
_CHUNK: Final = 8 << 20
"""Bytes of a request for what is read from front to back."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """An object, or all objects whose keys begin so, with those methods of `pathlib.Path` that are used here.

    They raise FileNotFoundError for an object that is not there, PermissionError, or OSError.
    """

    url: str
    """Without a slash at its end."""

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """The last of its key."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """As of a file."""
        return PurePosixPath(self.url).suffix

    @property
    def suffixes(self) -> list[str]:
        """As of a file."""
        return PurePosixPath(self.url).suffixes

    @property
    def parent(self) -> "ObjectPath":
        """What it lies in."""
        return ObjectPath(self.url.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is such an object, or one below it."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        """Whether there is such an object."""
        try:
            self.stamp()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        """Whether there is an object below it."""
        return next(self._below(), None) is not None

    def iterdir(self) -> Iterator["ObjectPath"]:
        """What lies in it."""
        folders, objects = self.listed()
        yield from (*folders, *objects)

    def listed(self) -> tuple[list["ObjectPath"], list["ObjectPath"]]:
        """The prefixes and the objects that lie in it."""
        import obstore

        api: Any = obstore
        with _told(self):
            found = api.list_with_delimiter(*self._place())
        objects = (about["path"] for about in found["objects"])
        prefixes, keys = ([PurePosixPath(key).name for key in some] for some in (found["common_prefixes"], objects))
        return [self / name for name in prefixes], [self / name for name in keys]

    def below(self) -> Iterator["ObjectPath"]:
        """All objects below it."""
        return (found for found, _ in self._below())

    def older(self, time_s: float) -> list["ObjectPath"]:
        """The objects below it that were put before `time_s`, seconds since 1970."""
        return [found for found, about in self._below() if about["last_modified"].timestamp() <= time_s]

    def stamp(self) -> tuple[int, str]:
        """Its size, and a text that changes with its content."""
        import obstore

        store, key = self._place()
        if not key:  # stores answer for the bucket, as if it were an object or with an error
            raise FileNotFoundError(f"{self} is a bucket, no object")
        with _told(self):
            about: Any = obstore.head(store, key)
        return about["size"], str(about["e_tag"] or about["last_modified"])

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Its content, for reading from front to back."""
        return io.BufferedReader(_Content(self), _CHUNK)

    def random(self) -> io.RawIOBase:
        """Its content, for reading here and there: a request for each read."""
        return _Content(self)

    def put(self, file: Path, *, new: bool = False) -> bool:
        """Put a file's content in its place, as a whole; with `new`, False where there is another yet."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with _told(self):
            try:
                obstore.put(*self._place(), file, mode="create" if new else "overwrite")
            except AlreadyExistsError:
                # An answer that was lost on its way has the put made again, which then finds itself.
                return self.get()[0] == file.read_bytes()
        return True

    def put_if(self, content: bytes, version: Any) -> Any:
        """Put a content if the object's version is this, or there is none for None; its new version, None if not."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with _told(self):
            try:
                return _version(obstore.put(*self._place(), content, mode=version or "create"))
            except (AlreadyExistsError, PreconditionError):
                return None

    def get(self) -> tuple[bytes, Any]:
        """Its content and version."""
        import obstore

        with _told(self):
            found = obstore.get(*self._place())
            return bytes(found.bytes()), _version(found.meta)

    def copy(self, to: "ObjectPath") -> None:
        """Copy it within its bucket."""
        import obstore

        store, key = self._place()
        with _told(self):
            obstore.copy(store, key, to._place()[1])

    def unlink(self) -> None:
        """Remove it, if it is there: Google's store says so if it is not, Amazon's does not."""
        import obstore

        with suppress(FileNotFoundError), _told(self):
            obstore.delete(*self._place())

    def _below(self) -> Iterator[tuple["ObjectPath", Any]]:
        import obstore

        api: Any = obstore
        store, key = self._place()
        bucket = self.url.removesuffix(key) if key else f"{self.url}/"
        with _told(self):
            for page in api.list(store, f"{key}/" if key else None, chunk_size=1000):
                yield from ((ObjectPath(bucket + about["path"]), about) for about in page)

    def _place(self) -> tuple[Any, str]:
        scheme, _, rest = self.url.partition("://")
        bucket, _, key = rest.partition("/")
        with _told(self):
            return _bucket(f"{scheme}://{bucket}", _endpoint()), key


Location: TypeAlias = Path | ObjectPath
Where: TypeAlias = str | Path | ObjectPath
"""As it is given: a path, a URL as text, or what `locate` made of one."""


def locate(where: Where) -> Location:
    """Where a path or URL leads. Raises ConfigError for a URL of another kind, or one that was made a path."""
    if isinstance(where, ObjectPath):
        return where
    text = str(where)
    if isinstance(where, Path):
        if re.match(r"(s3|gs):/", text):
            raise ConfigError(f"{text} was a URL and has lost a slash as a path: give it as text")
        return where
    if _URL.fullmatch(text):
        return ObjectPath(text.rstrip("/"))
    if "://" in text:
        raise ConfigError(f"{text} is no place that is known: expected a folder, s3://BUCKET/... or gs://BUCKET/...")
    return Path(text)


def scan_options(location: Location) -> dict[str, Any]:
    """What `polars.scan_parquet` is told to read there as this module does."""
    if isinstance(location, Path):
        return {}
    return {
        "credential_provider": None,
        "storage_options": {"allow_http": str(_without_tls(location.url, _endpoint())).lower()},
    }


def put(file: Path, to: Location, *, new: bool = False) -> bool:
    """Move a file to where it appears whole and durable; with `new`, False if an object has that name already."""
    if isinstance(to, Path):
        os.replace(file, to)
        sync(to.parent)
        return True
    done = to.put(file, new=new)
    file.unlink()
    return done


def move(path: Location, to: Location) -> None:
    """Move what was replaced out of the way; its age counts from now. In folders `sync` makes it durable."""
    if isinstance(path, Path):
        os.utime(path)
        os.replace(path, str(to))
    elif isinstance(to, ObjectPath):
        path.copy(to)
        path.unlink()


def older(folder: Location, age_s: float, now_s: float) -> list[Path] | list[ObjectPath]:
    """The files two folders down that are `age_s` or older."""
    if isinstance(folder, Path):
        return [path for path in folder.glob("*/*") if path.stat().st_mtime <= now_s - age_s]
    return folder.older(now_s - age_s)


def sync(place: Location) -> None:
    """Make a file, or renames in a folder, durable; in a store what is done is durable."""
    if isinstance(place, Path):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@cache
def _bucket(url: str, endpoint: str) -> Any:
    from obstore.store import from_url

    return from_url(url, client_options={"allow_http": _without_tls(url, endpoint)})


def _endpoint() -> str:
    """Of the S3 server, if it is not Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL", "")


def _without_tls(url: str, endpoint: str) -> bool:
    """Whether a server may be spoken to without TLS, if its address begins with http://.

    That of a Google server may stand in a file that obstore reads, so its scheme alone decides, as it does by default.
    """
    return url.startswith("gs://") or endpoint.startswith("http://")


def _version(about: Any) -> dict[str, str]:
    return {name: about[name] for name in ("e_tag", "version") if about[name] is not None}


@contextmanager
def _told(path: ObjectPath) -> Generator[None]:
    """Errors of the store as those of files, in one line."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} is not there") from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise PermissionError(f"{path} may not be had with the credentials of the environment") from error
    except BaseError as error:
        first = str(error).partition("\n")[0]
        raise OSError(f"{path}: {first:.300}") from error


class _Content(io.RawIOBase):
    """An object as a file that is read by ranges."""

    def __init__(self, path: ObjectPath) -> None:
        self.name = str(path)
        self._path = path
        self._size, _ = path.stamp()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        import obstore

        store, key = self._path._place()  # pyright: ignore[reportPrivateUsage]  of this file
        with _told(self._path):
            data = obstore.get_range(store, key, start=self._at, length=length)
        buffer[:length] = memoryview(data)
        self._at += length
        return length
