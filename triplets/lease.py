"""The lock of a dataset's one writer: of the system on a folder, a lease on an object store.

A store has no locks that go with their holder. So the object `.lock` names the holder, who puts it anew every RENEW_S;
each put is on the condition that the object is still the holder's last. Whoever finds a holder waits: if the object
changes, the holder lives, and the newcomer is refused; if it does not for LEASE_S, the holder is dead and the newcomer
takes the object over, again on condition, so that only one of several does. No clocks are compared. A holder that could
not renew for half of LEASE_S writes no more; what it commits with is put on the condition that nobody has that part. So
a commit of two writers under one number cannot be; a writer that was stopped for LEASE_S between two files of one part
and then goes on may leave a part that lacks files, which readers report.
"""

import fcntl
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final, Protocol

from spanmill.errors import DatasetError
from spanmill.storage import Location, ObjectPath
from spanmill.triplets.parts import LOCK_NAME

RENEW_S: Final = 5.0
LEASE_S: Final = 30.0
_POLL_S: Final = 0.5
_FREE: Final = b"free"


class Lock(Protocol):
    """Held by the one writer."""

    def check(self) -> None:
        """Raises DatasetError if it was lost."""

    def close(self) -> None:
        """Let another writer in."""


def take(root: Location) -> Lock:
    """The lock of the dataset; raises DatasetError if another has it, OSError if there is no telling."""
    return _Folder(root) if isinstance(root, Path) else _Lease(root)


def _refused(root: Location) -> DatasetError:
    return DatasetError(f"another spanmill is writing to {root}; stop it or choose another folder")


class _Folder:
    def __init__(self, root: Path) -> None:
        self._file = (root / LOCK_NAME).open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise _refused(root) from error

    def check(self) -> None:
        """Held as long as the file is open."""

    def close(self) -> None:
        """Let another writer in, even while forked children still have the lock file open."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()


class _Lease:
    def __init__(self, root: ObjectPath) -> None:
        self._root = root
        self._path = root / LOCK_NAME
        self._holder = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"
        self._count = 0
        self._ended = threading.Event()
        self._lost = False
        self._taken = time.monotonic()
        self._version = self._first()
        self._renewer = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewer.start()

    def check(self) -> None:
        if self._lost or time.monotonic() - self._taken > LEASE_S / 2:
            raise DatasetError(f"the lease on {self._root} was lost: another spanmill has it, or the store was away")

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._renewer.join()
        if not self._lost:
            self._path.put_if(_FREE, self._version)

    def _first(self) -> Any:
        since, seen = time.monotonic(), None
        while True:
            self._taken = time.monotonic()
            if version := self._path.put_if(self._content(), None):
                return version
            try:
                content, found = self._path.get()
            except FileNotFoundError:
                continue
            if content.startswith(self._holder.encode()):
                return found  # by a put whose answer was lost
            if seen is None:
                since, seen = time.monotonic(), found
            if content == _FREE or (found == seen and time.monotonic() - since > LEASE_S):
                self._taken = time.monotonic()
                if version := self._path.put_if(self._content(), found) or self._own():
                    return version
            if content == _FREE or found != seen:
                raise _refused(self._root)
            time.sleep(_POLL_S)

    def _content(self) -> bytes:
        """Another each time, so that its version is."""
        self._count += 1
        return f"{self._holder} {self._count}".encode()

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            before = time.monotonic()
            try:
                version = self._path.put_if(self._content(), self._version) or self._own()
            except FileNotFoundError:
                version = None
            except OSError:
                continue  # `check` tells when that has lasted too long
            if version is None:
                self._lost = True
                return
            self._version, self._taken = version, before

    def _own(self) -> Any:
        """The version that stands there, if a put of ours made it whose answer was lost; else None."""
        content, version = self._path.get()
        return version if content.startswith(self._holder.encode()) else None
