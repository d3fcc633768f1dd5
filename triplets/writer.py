"""The one writer of a dataset: commits parts, keeps the newest rows only, and leaves no trace of a crash.

A part is committed by the rename of its file in `rollouts/`; there is no manifest. After a crash between any two steps
the readers see either all of a part or nothing, and the next start finishes or undoes the rest.
"""

import json
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

import polars as pl
import pyarrow as pa

from spanmill.errors import DatasetError
from spanmill.storage import Location, Where, locate, move, older, put, sync
from spanmill.triplets.lease import Lock, take
from spanmill.triplets.newest import Newest
from spanmill.triplets.parquet import read_file, write_file
from spanmill.triplets.parts import (
    KEY,
    MOVED,
    ORIGINS_KEY,
    REPLACES_KEY,
    STRAY_KEY,
    active_parts,
    file_metadata,
    old_path,
    origins_of,
    packed_origins,
    part_numbers,
    part_path,
    read_footers,
    rollout_index,
    stray_rows,
    temporary_path,
)
from spanmill.triplets.records import Quarantined, Rollout
from spanmill.triplets.rewrite import Key, Part, choose_parts, merge_rows, merge_strays, row_keys, split_by_key
from spanmill.triplets.schema import QUARANTINE, ROLLOUTS, TABLES, TableSpec
from spanmill.triplets.table import rows_to_tables

MAX_PART_BYTES = 256 << 20


def stray_key(trace_id: str, span_id: str, reason: str, detail: str, span: str) -> bytes:
    """A digest by which a stray quarantine row is known again: of all it says but when it was received."""
    return blake2b(json.dumps([trace_id, span_id, reason, detail, span]).encode(), digest_size=16).digest()


class DatasetWriter:
    """Opens (or makes) the dataset in a folder or object store and locks it; not for use by several threads at once.

    Every method raises DatasetError if a file cannot be written or read. After an error nothing is half done: the next
    call first clears away what the failed one left, as a new start would.
    """

    def __init__(self, root: Where) -> None:
        self._root = locate(root)
        try:
            str(self._root).encode()
        except UnicodeEncodeError as error:
            raise DatasetError(f"{str(self._root)!r} is no name for a dataset: it is not UTF-8") from error
        self._parts: dict[int, int] = {}
        """Active parts and their uncompressed sizes."""
        self._next = 1
        self._newest = Newest()
        self._superseded: dict[int, set[Key]] = {}
        """Per active part, the keys whose rows there a newer revision replaced."""
        self._moved: set[Key] = set()
        with ExitStack() as opened:
            self._lock = self._take_lock()
            opened.callback(self._lock.close)
            with self._reported("open"):
                self._scratch = self._made_scratch(opened)
                self._recover()
            self._opened = opened.pop_all()
        self._settled = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let another writer in, even while forked children still have the lock file open."""
        with self._reported("close"):
            self._opened.close()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is committed."""
        return not self._parts

    def newest(self, keys: Collection[Key]) -> dict[Key, tuple[int, int]]:
        """(revision, part) of the newest committed rows of each (rollout_id, attempt) that has any."""
        return self._newest.of(keys)

    def write(self, rollouts: Sequence[Rollout], stray: Sequence[Quarantined] = ()) -> int:
        """Commit a part with these rollouts, in the order given, and the quarantine rows under none; its number.

        Raises ValueError if a (rollout, attempt) comes twice or with a lower revision than the committed one, or as
        `rows_to_tables` does.
        """
        tables = rows_to_tables(rollouts, stray)
        with self._changing("write to"):
            revisions = _revisions(tables["rollouts"])
            if len(revisions) < len(rollouts):
                raise ValueError(
                    "a part cannot hold two revisions of one (rollout, attempt); write them one after another"
                )
            before = self._newest.of(revisions)
            for key, (revision, _) in before.items():
                if revisions[key] < revision:
                    raise ValueError(f"revision {revisions[key]} of {key} is older than the committed {revision}")
            number = self._commit(tables, len(stray), ())
            for key, (_, part) in before.items():
                self._superseded.setdefault(part, set()).add(key)
            self._moved.difference_update(revisions)
            self._note_rows(number, tables["rollouts"])
        return number

    def take(self, folder: Path) -> int:
        """Commit the part whose files `write_part` left in `folder`, for a dataset in a folder on its file system; its
        number.

        Raises ValueError if one of its (rollout, attempt) is committed already.
        """
        with self._changing("write to"):
            rows = read_file(folder / _file_name(ROLLOUTS), [*KEY, "revision", "num_calls", "flags"])
            keys = row_keys(rows)
            again = self._newest.of(keys)
            if again or len(set(keys)) < len(keys):
                raise ValueError(f"the rows of {next(iter(again), 'one rollout')} come twice")
            number = self._next
            self._place(number, {table.name: folder / _file_name(table) for table in TABLES})
            self._note_rows(number, rows)
        return number

    def rewrite(self, max_bytes: int = MAX_PART_BYTES) -> int | None:
        """Rewrite one group of small parts, or of parts with superseded rows, into one; its number.

        Returns None when there is nothing to do, so `while writer.rewrite() is not None: pass` leaves newest rows only
        under the table folders. Rows come into the order of (rollout_id, attempt) where parts are joined. Parts of at
        most `max_bytes` uncompressed are made, larger ones only where one was written so.
        """
        with self._changing("rewrite parts of"):
            chosen = choose_parts(self._measured(), max_bytes)
            if not chosen:
                return None
            gone = {key for key, (_, part) in self._newest.of(self._moved).items() if part in chosen}
            dropped = [self._superseded.get(number, set[Key]()) | gone for number in chosen]
            tables, strays = self._merged(chosen, dropped)
            number = self._commit(tables, strays, chosen, self._origins(chosen, tables["rollouts"]))
            self._retire(chosen)
            self._newest.update((key, (revision, number)) for key, revision in _versions(tables["rollouts"]))
            self._newest.remove(gone)
            self._moved -= gone
        return number

    def purge_old(self, age_s: float, now_s: float) -> int:
        """Remove the files that were replaced `age_s` or longer before `now_s` (seconds since 1970); how many."""
        with self._reported("remove old parts of"):
            files = older(self._root / ".old", age_s, now_s)
            for path in files:
                path.unlink()
        return len(files)

    def read_rows(self, keys: Collection[Key]) -> dict[Key, dict[str, pa.Table]]:
        """The newest committed rows of each key that has any, as an Arrow table per table name."""
        wanted: dict[int, list[Key]] = {}
        for key, (_, part) in self._newest.of(keys).items():
            wanted.setdefault(part, []).append(key)
        found: dict[Key, dict[str, pa.Table]] = {key: {} for part in wanted.values() for key in part}
        with self._reported("read"):
            for number, part_keys in wanted.items():
                for table in TABLES:
                    rows = read_file(part_path(self._root, table, number))
                    if table is QUARANTINE:
                        rows = rows.slice(0, rows.num_rows - stray_rows(self._root, number))
                    for key, own in split_by_key(rows, part_keys).items():
                        found[key][table.name] = own
        return found

    def stray_rows(self) -> set[bytes]:
        """`stray_key` of every committed quarantine row that stands under no rollout; read from disk."""
        keys = set[bytes]()
        with self._reported("read"):
            for number in self._parts:
                if count := stray_rows(self._root, number):
                    rows = read_file(part_path(self._root, QUARANTINE, number))
                    columns = rows.slice(rows.num_rows - count).select(
                        ["trace_id", "span_id", "reason", "detail", "span"]
                    )
                    keys.update(stray_key(**row) for row in columns.to_pylist())
        return keys

    def _take_lock(self) -> Lock:
        with self._reported("make"):
            if isinstance(self._root, Path):
                _make_folders(self._root)
            return take(self._root)

    def _made_scratch(self, opened: ExitStack) -> Path:
        """Where the files of a part are written before they are put in place."""
        if isinstance(self._root, Path):
            return self._root
        scratch = Path(opened.enter_context(TemporaryDirectory(prefix="spanmill-")))
        for table in TABLES:
            (scratch / table.name).mkdir()
        return scratch

    @contextmanager
    def _reported(self, verb: str) -> Generator[None]:
        try:
            yield
        except DatasetError:
            raise
        except OSError as error:
            raise DatasetError(f"cannot {verb} the dataset {self._root}: {error}") from error

    @contextmanager
    def _changing(self, verb: str) -> Generator[None]:
        """Around a change: clears away what a failed one left, and notes if this one fails too."""
        with self._reported(verb):
            self._lock.check()
            if not self._settled:
                self._recover()
            self._settled = False
            yield
            self._settled = True

    def _recover(self) -> None:
        """Read what counts, and move away the rest: what was not committed, and what was replaced."""
        footers = read_footers(self._root)
        active = active_parts(footers)
        committed = {footer.number for footer in footers}
        for table in TABLES:
            for path in (self._scratch / table.name).glob(".part-*.tmp"):
                path.unlink()
        self._next = max(committed, default=0) + 1
        paths = {number: [part_path(self._root, table, number) for table in TABLES] for number in active}
        self._parts = {number: _uncompressed(files) for number, files in paths.items()}
        self._newest, self._superseded, self._moved = Newest(), {}, set()
        self._note(active)
        present = {number for table in TABLES for number in part_numbers(self._root, table)}
        self._retire(sorted(present.difference(active)))

    def _note(self, parts: Sequence[int]) -> None:
        """Take up the rollouts of these parts."""
        rows = rollout_index(self._root, parts)
        newest = rows.filter("newest").select(*KEY, "revision", "part").iter_rows()
        self._newest.update(((rollout_id, attempt), (revision, part)) for rollout_id, attempt, revision, part in newest)
        for rollout_id, attempt, part in rows.filter(~pl.col("newest")).select(*KEY, "part").iter_rows():
            self._superseded.setdefault(part, set()).add((rollout_id, attempt))
        self._moved.update(rows.filter("moved").select(*KEY).iter_rows())

    def _note_rows(self, number: int, rows: pa.Table) -> None:
        """Take up the rollouts of a part that has just been written, each of them the newest."""
        told = zip(rows.column("num_calls").to_pylist(), rows.column("flags").to_pylist(), strict=True)
        versions = _versions(rows)
        self._newest.update((key, (revision, number)) for key, revision in versions)
        self._moved.update(
            key for (key, _), (calls, flags) in zip(versions, told, strict=True) if not calls and MOVED in flags
        )

    def _origins(self, chosen: Sequence[int], rollouts: pa.Table) -> bytes:
        """Where the rows of a part that is to replace the chosen ones were first committed."""
        origins: dict[tuple[Key, int], int] = {}
        for number in chosen:
            rows = read_file(part_path(self._root, ROLLOUTS, number), [*KEY, "revision"])
            origins |= zip(_versions(rows), origins_of(self._root, number), strict=True)
        return packed_origins([origins[version] for version in _versions(rollouts)])

    def _commit(
        self, tables: Mapping[str, pa.Table], strays: int, replaces: Sequence[int], origins: bytes | None = None
    ) -> int:
        """Write a part to every table and rename it into place, `rollouts` last."""
        number = self._next
        files = {table.name: temporary_path(self._scratch, table, number) for table in TABLES}
        _write_files(files, tables, strays, replaces, origins)
        self._place(number, files)
        return number

    def _place(self, number: int, files: Mapping[str, Path]) -> None:
        """Rename the files of a part, by table name, to what they are called in the dataset."""
        size = _uncompressed(files.values())
        for table in reversed(TABLES):
            if table is ROLLOUTS:
                self._lock.check()
            if not put(files[table.name], part_path(self._root, table, number), new=table is ROLLOUTS):
                raise DatasetError(f"another spanmill has written part {number} of {self._root}; stop one of them")
        self._parts[number] = size
        self._next = number + 1

    def _retire(self, numbers: Sequence[int]) -> None:
        """Move parts out of every glob's way; durable before a later part can replace the one that names them."""
        for table in TABLES:
            present = [number for number in numbers if part_path(self._root, table, number).exists()]
            for number in present:
                move(part_path(self._root, table, number), old_path(self._root, table, number))
            if present:
                sync(self._root / table.name)
        for number in numbers:
            self._parts.pop(number, None)
            self._superseded.pop(number, None)

    def _measured(self) -> list[Part]:
        """The active parts, ascending, and whether they hold rows that are to go."""
        dirty = self._superseded.keys() | {part for _, part in self._newest.of(self._moved).values()}
        return [Part(number, size, number in dirty) for number, size in self._parts.items()]

    def _merged(self, chosen: Sequence[int], dropped: Sequence[set[Key]]) -> tuple[dict[str, pa.Table], int]:
        """The rows of the chosen parts without the dropped ones, and how many of `quarantine` are strays."""
        merged: dict[str, pa.Table] = {}
        strays = 0
        for table in TABLES:
            rows = [read_file(part_path(self._root, table, number)) for number in chosen]
            if table is not QUARANTINE:
                merged[table.name] = merge_rows(rows, dropped)
                continue
            ends = [part.num_rows - stray_rows(self._root, n) for n, part in zip(chosen, rows, strict=True)]
            own = merge_rows([part.slice(0, end) for part, end in zip(rows, ends, strict=True)], dropped)
            stray = merge_strays([part.slice(end) for part, end in zip(rows, ends, strict=True)])
            merged[table.name] = pa.concat_tables([own, stray])
            strays = stray.num_rows
        return merged, strays


def _make_folders(root: Path) -> None:
    new = not root.exists()
    for folder in (root, root / ".old"):
        for table in TABLES:
            (folder / table.name).mkdir(parents=True, exist_ok=True)
        sync(folder)
    if new:
        sync(root.parent)


def _uncompressed(files: Iterable[Location]) -> int:
    """Bytes of the rows of Parquet files."""
    found = [file_metadata(file) for file in files]
    return sum(file.row_group(group).total_byte_size for file in found for group in range(file.num_row_groups))


def _versions(rollouts: pa.Table) -> list[tuple[Key, int]]:
    return list(zip(row_keys(rollouts), rollouts.column("revision").to_pylist(), strict=True))


def write_part(folder: Path, tables: Mapping[str, pa.Table], strays: int) -> None:
    """Write the files of a part, `folder`/TABLE.parquet, durably, for `DatasetWriter.take` to commit them.

    For other processes than the one that has the dataset open. `strays` rows of `quarantine`, its last, stand under no
    rollout. Raises OSError.
    """
    _write_files({table.name: folder / _file_name(table) for table in TABLES}, tables, strays)


def _file_name(table: TableSpec) -> str:
    return f"{table.name}.parquet"


def _write_files(
    files: Mapping[str, Path],
    tables: Mapping[str, pa.Table],
    strays: int,
    replaces: Sequence[int] = (),
    origins: bytes | None = None,
) -> None:
    metadata = {
        ROLLOUTS.name: {REPLACES_KEY: json.dumps(list(replaces)).encode()}
        | ({} if origins is None else {ORIGINS_KEY: origins}),
        QUARANTINE.name: {STRAY_KEY: str(strays).encode()},
    }
    for name, path in files.items():
        write_file(path, tables[name], metadata.get(name, {}))


def _revisions(rollouts: pa.Table) -> dict[Key, int]:
    return dict(_versions(rollouts))
