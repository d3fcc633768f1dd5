"""`spanmill.RecordStore`: rollouts by the prefix of their ids, from a running collector, for schedulers."""

import json
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from types import TracebackType
from typing import Any, Final, Self, cast
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import ProxyHandler, Request, build_opener

from spanmill.errors import CollectorError, UnknownRecordError
from spanmill.instrument.exporters import with_scheme
from spanmill.instrument.posted import DEFAULT_ENDPOINT

_PAGE: Final = 1000
_GRACE_S: Final = 30.0
"""For an answer to come, beside what the collector was asked to wait."""


class RecordStore:
    """A collector's rollouts. Needs nothing but Python; tables come as Arrow bytes.

        store = spanmill.RecordStore("http://127.0.0.1:4318")
        store.patch("batch-7/task-1/0", reward=1.0, info={"verifier": "v2"})
        with store.drain("batch-7/") as drained:
            train(polars.read_ipc_stream(drained.table("episodes")))

    Every method raises CollectorError if the collector does not answer or refuses, UnknownRecordError for what it does
    not know.
    """

    def __init__(self, endpoint: str = DEFAULT_ENDPOINT, token: str | None = None, timeout: float = _GRACE_S) -> None:
        """`endpoint` is the collector's HTTP address, `token` one of its bearer tokens, `timeout` in seconds."""
        self._base = with_scheme(endpoint).rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        local = "//127.0.0.1" in self._base or "//localhost" in self._base
        self._opener = build_opener(ProxyHandler({})) if local else build_opener()

    def list(self, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Attempts whose rollout id begins with `prefix`, by id.

        Each has `rollout_id` and `state`: open (spans came, no rows yet), ready (finished, handed to nobody), handed
        (not acknowledged), drained, or revised (rows have changed since they were handed over); but for open ones also
        `attempt`, `revision`, `status`, `reward`, `num_episodes` and `flags`.
        """
        after = ""
        while rows := self._json("GET", f"/v1/records?{urlencode({'prefix': prefix, 'after': after, 'limit': _PAGE})}")[
            "records"
        ]:
            # The attempts of the last id may go on behind the page.
            last = rows[-1]["rollout_id"]
            whole = [row for row in rows if row["rollout_id"] != last] if len(rows) == _PAGE else rows
            yield from whole or rows
            if len(rows) < _PAGE:
                return
            after = (whole or rows)[-1]["rollout_id"]

    def get(self, rollout_id: str, attempt: int | None = None) -> dict[str, Any]:
        """The rows of an attempt (None: the highest): a dict of `rollouts` (one row), `triplets` and `episodes`."""
        query = {"id": rollout_id} | ({} if attempt is None else {"attempt": attempt})
        return self._json("GET", f"/v1/records/rollout?{urlencode(query)}")

    def patch(
        self,
        rollout_id: str,
        *,
        reward: float | None = None,
        info: Mapping[str, Any] | None = None,
        call_ids: Sequence[str] | None = None,
        attempt: int | None = None,
    ) -> dict[str, Any]:
        """Reward a rollout, or add info to it; with `call_ids` these of its calls. On the collector's disk at return.

        `info` is added under `metadata.info`, name by name, the newest value of a name counts. The answer has the
        `attempt` that was meant and `unverified_calls`: named calls of a rollout that is still open.
        """
        body = {"rollout_id": rollout_id, "reward": reward, "info": info, "call_ids": call_ids, "attempt": attempt}
        return self._json(
            "POST", "/v1/records/patch", {name: value for name, value in body.items() if value is not None}
        )

    def drain(self, prefix: str, *, flush: bool = True, timeout: float = 30.0) -> "Drained":
        """Take over the finished rollouts whose ids begin with `prefix`: each revision of each once.

        With `flush` everything that was received under the prefix is closed first, which may take `timeout` seconds.
        A drain that was not acknowledged comes again, under its id and unchanged, before anything newer does.
        """
        body = {"prefix": prefix, "flush": flush, "timeout": timeout}
        return Drained(self, self._json("POST", "/v1/records/drain", body, self._timeout + timeout))

    def table(self, drain: str, table: str) -> bytes:
        """One table of a drain, `rollouts`, `triplets` or `episodes`, as an Arrow IPC stream."""
        return self._ask("GET", f"/v1/records/drains/{quote(drain, safe='')}/{quote(table, safe='')}")

    def acknowledge(self, drain: str) -> int:
        """Say that a drain has arrived, as often as you like; how many rollouts it had."""
        return self._json("POST", f"/v1/records/drains/{quote(drain, safe='')}/ack")["acknowledged"]

    def _json(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> dict[str, Any]:
        answer = self._ask(method, path, body, timeout)
        try:
            return cast("dict[str, Any]", json.loads(answer))
        except ValueError as error:
            raise CollectorError(f"{self._base} is no HTTP address of a collector") from error

    def _ask(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> bytes:
        url = f"{self._base}{path}"
        data = None if method == "GET" else json.dumps({} if body is None else body).encode()
        request = Request(url, data, self._headers | {"Content-Type": "application/json"}, method=method)
        try:
            with self._opener.open(request, timeout=timeout or self._timeout) as answer:
                return answer.read()
        except HTTPError as error:
            raise _refusal(error, url) from error
        except HTTPException as error:
            raise CollectorError(f"{self._base} is no HTTP address of a collector") from error
        except OSError as error:
            raise CollectorError(f"no collector answers at {url}: {getattr(error, 'reason', error)}") from error


class Drained:
    """What was handed over. As a context manager it acknowledges at the end of the block, unless that raises."""

    def __init__(self, store: RecordStore, answer: dict[str, Any]) -> None:
        drain: dict[str, Any] = answer["drain"] or {}
        self._store = store
        self.id: str | None = drain.get("id")
        """None if there was nothing to hand over."""
        self.rollouts: int = drain.get("rollouts", 0)
        self.again: bool = drain.get("again", False)
        """It was handed over before, and nobody acknowledged it."""
        self.open: list[str] = answer["open"]
        """Rollouts with the prefix that have no rows yet."""
        self.waiting: list[dict[str, Any]] = answer["waiting"]
        """Drains of other prefixes, not acknowledged, that may hold such rollouts: `id`, `prefix`, `rollouts`."""

    def table(self, name: str) -> bytes:
        """`rollouts`, `triplets` or `episodes` as an Arrow IPC stream, until it is acknowledged."""
        if self.id is None:
            raise UnknownRecordError("nothing was handed over: there is no table")
        return self._store.table(self.id, name)

    def acknowledge(self) -> None:
        """Say that it has arrived: it is not handed over again."""
        if self.id is not None:
            self._store.acknowledge(self.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.acknowledge()


def _refusal(error: HTTPError, url: str) -> CollectorError:
    try:
        said = str(json.loads(error.read())["message"])
    except (ValueError, TypeError, KeyError, OSError):
        if error.code == 404:
            return CollectorError(f"{url} is not there: that is no collector, or one without a record store")
        said = error.reason
    return UnknownRecordError(said) if error.code == 404 else CollectorError(f"{url} refuses: {error.code} {said}")
