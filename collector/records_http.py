"""`/v1/records`: the dataset as a store for schedulers, over HTTP.

GET  /v1/records?prefix=P&after=ID&limit=N      attempts and what state they are in
GET  /v1/records/rollout?id=ID&attempt=N        the rows of one, as JSON
POST /v1/records/patch                          {rollout_id, attempt?, reward?, info?, call_ids?}
POST /v1/records/drain                          {prefix, flush?, timeout?}
GET  /v1/records/drains                         those that were not acknowledged
GET  /v1/records/drains/DRAIN/TABLE             its rows, an Arrow IPC stream
POST /v1/records/drains/DRAIN/ack
"""

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from spanmill import semconv as sc
from spanmill.collector import rewards
from spanmill.collector.ingest import Answer, Ingest, Lease
from spanmill.collector.journal import Kind
from spanmill.collector.receive_http import JSON, Handler, Unknown, endpoint, media_type, read_body
from spanmill.collector.records import Records, as_json
from spanmill.errors import DatasetError

MOST_LISTED: Final = 10_000
FLUSH_S: Final = 30.0
"""How long a drain waits for what it flushes, where it does not say."""
KNOWN_S: Final = 3.0
"""How long a patch waits for a rollout that nobody knows: its spans may have come a moment ago."""
POLL_S: Final = 0.05

T = TypeVar("T")


class RecordRoutes:
    """What is served, by any worker: the state is in files."""

    def __init__(self, ingest: Ingest, records: Records, unknown: Unknown) -> None:
        self._ingest = ingest
        self._records = records
        self._unknown = unknown

    def routes(self) -> list[BaseRoute]:
        """The routes."""
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/v1/records", self._list),
            ("GET", "/v1/records/rollout", self._get),
            ("POST", "/v1/records/patch", self._patch),
            ("POST", "/v1/records/drain", self._drain),
            ("GET", "/v1/records/drains", self._waiting),
            ("GET", "/v1/records/drains/{drain}/{table}", self._table),
            ("POST", "/v1/records/drains/{drain}/ack", self._acknowledge),
        ]
        return [Route(path, endpoint(self._ingest, handler), methods=[method]) for method, path, handler in table]

    async def _list(self, ingest: Ingest, request: Request, lease: Lease) -> Response:
        query = request.query_params
        most = _whole(query.get("limit"), "limit", 1, MOST_LISTED) or 1000
        rows = await _read(self._records.listed, query.get("prefix", ""), query.get("after", ""), most)
        return _json({"records": rows})

    async def _get(self, ingest: Ingest, request: Request, lease: Lease) -> Response:
        rollout_id = request.query_params.get("id", "")
        attempt = _whole(request.query_params.get("attempt"), "attempt", 0, (1 << 31) - 1)
        if not rollout_id:
            raise HTTPException(400, "id: expected the id of a rollout")
        found = await _read(self._records.rollout, rollout_id, attempt)
        if found is None:
            known = await _read(self._unknown, [rollout_id]) == []
            why = "is open: it has no rows of that attempt yet" if known else "is not known: no span has named it"
            raise HTTPException(404, f"rollout {rollout_id} {why}")
        return _json(found)

    async def _patch(self, ingest: Ingest, request: Request, lease: Lease) -> Response | Answer:
        body = await _fields(ingest, request, lease, ("rollout_id", "attempt", "reward", "info", "call_ids"))
        if isinstance(body, Answer):
            return body
        rollout_id, call_ids, info = body.get("rollout_id"), body.get("call_ids"), body.get("info")
        if not isinstance(rollout_id, str) or not rollout_id:
            raise HTTPException(400, "rollout_id: expected the id of a rollout")
        if call_ids is not None and not _texts(call_ids):
            raise HTTPException(400, "call_ids: expected a list of ids, or nothing for the rollout itself")
        if info is not None and not _is_object(info):
            raise HTTPException(400, "info: expected an object, without NaN and infinity")
        if info is None and body.get("reward") is None:
            raise HTTPException(400, "expected reward, info or both")
        now_ns = time.time_ns()
        attempt, unverified = await self._named(rollout_id, body.get("attempt"), call_ids or [])
        if body.get("reward") is not None:
            one = {"rollout_id": rollout_id, "attempt": attempt, "value": body["reward"]}
            given = [{**one, "call_id": call_id} for call_id in call_ids] if call_ids else [one]
            posted = await asyncio.to_thread(rewards.parse, json.dumps(given).encode(), now_ns)
            await asyncio.wrap_future(ingest.journal.append_async(Kind.REWARDS, rewards.encode(posted), now_ns))
            ingest.count("rewards", len(posted))
        if info is not None:
            record = _info_record(rollout_id, attempt, cast("dict[str, Any]", info), call_ids or [], now_ns)
            await asyncio.wrap_future(ingest.journal.append_async(Kind.LOGS_JSON, record, now_ns))
        return _json({"rollout_id": rollout_id, "attempt": attempt, "unverified_calls": unverified})

    async def _named(self, rollout_id: str, attempt: object, call_ids: list[str]) -> tuple[int, list[str]]:
        """The attempt that is meant, and calls that cannot be told yet; HTTPException 404 for what is not known."""
        if attempt is not None and (not isinstance(attempt, int) or isinstance(attempt, bool) or attempt < 0):
            raise HTTPException(400, f"attempt: expected a whole number from 0, found {json.dumps(attempt)}")
        deadline = time.monotonic() + KNOWN_S
        while (unknown := await _read(self._unknown, [rollout_id])) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if unknown is None:
            raise HTTPException(503, "the index cannot be read: try again", {"Retry-After": "1"})
        found = await _read(self._records.rollout, rollout_id, attempt)
        if unknown and found is None:
            raise HTTPException(404, f"rollout {rollout_id} is not known: no span has named it; nothing was stored")
        if found is None:
            return attempt or 0, call_ids
        number: int = found["rollouts"]["attempt"]
        calls = {row["call_id"] for row in found["triplets"]}
        missing = [call_id for call_id in call_ids if call_id not in calls]
        if missing:
            shown = ", ".join(missing[:5])
            raise HTTPException(404, f"rollout {rollout_id} has no call {shown}; nothing was stored")
        return number, []

    async def _drain(self, ingest: Ingest, request: Request, lease: Lease) -> Response | Answer:
        body = await _fields(ingest, request, lease, ("prefix", "flush", "timeout"))
        if isinstance(body, Answer):
            return body
        prefix, flush, timeout = body.get("prefix"), body.get("flush", True), body.get("timeout", FLUSH_S)
        if not isinstance(prefix, str):
            raise HTTPException(400, "prefix: expected a text; an empty one means every rollout")
        if not isinstance(flush, bool):
            raise HTTPException(400, "flush: expected true or false")
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout <= 3600:
            raise HTTPException(400, "timeout: expected seconds from 0 to 3600")
        if flush:
            await self._flush(prefix, timeout)
        drain = await _read(self._records.drain, prefix)
        others = [one for one in await _read(self._records.waiting, prefix) if drain is None or one.id != drain.id]
        return _json(
            {
                "drain": None if drain is None else drain._asdict(),
                "open": await _read(self._records.still_open, prefix),
                "waiting": [one._asdict() for one in others],
            }
        )

    async def _flush(self, prefix: str, timeout: float) -> None:
        """Return when all is written that was received under the prefix; HTTPException 503 if that takes too long."""
        deadline = time.monotonic() + timeout
        append = self._ingest.journal.append_async(Kind.FLUSH, prefix.encode(), time.time_ns())
        position = await asyncio.wrap_future(append)
        while not await _read(self._records.flushed, position, prefix):
            if time.monotonic() > deadline:
                why = f"what was received is not written within {timeout:g} s: nothing was handed over, ask again"
                raise HTTPException(503, why, {"Retry-After": "1"})
            await asyncio.sleep(POLL_S)

    async def _waiting(self, ingest: Ingest, request: Request, lease: Lease) -> Response:
        found = await _read(self._records.waiting, request.query_params.get("prefix", ""))
        return _json({"waiting": [one._asdict() for one in found]})

    async def _table(self, ingest: Ingest, request: Request, lease: Lease) -> Response:
        drain, table = request.path_params["drain"], request.path_params["table"]
        path = await _read(self._records.file, drain, table)
        if path is None:
            raise HTTPException(404, f"no drain {drain} with a table {table} waits to be acknowledged")
        return FileResponse(path, media_type="application/vnd.apache.arrow.stream")

    async def _acknowledge(self, ingest: Ingest, request: Request, lease: Lease) -> Response:
        drain = request.path_params["drain"]
        rollouts = await _read(self._records.acknowledge, drain)
        if rollouts is None:
            raise HTTPException(404, f"there never was a drain {drain}")
        return _json({"drain": drain, "acknowledged": rollouts})


async def _read(ask: Callable[..., T], *given: Any) -> T:
    """An answer from files, in a thread; HTTPException 503 while they cannot be read."""
    try:
        return await asyncio.to_thread(ask, *given)
    except (sqlite3.Error, DatasetError) as error:
        raise HTTPException(503, f"{error}: try again", {"Retry-After": "1"}) from error


async def _fields(ingest: Ingest, request: Request, lease: Lease, known: tuple[str, ...]) -> dict[str, Any] | Answer:
    """The JSON object of a request. HTTPException 400 if it is none or has other fields."""
    media_type(request, [JSON])
    body = await read_body(ingest, request, lease)
    if isinstance(body, Answer):
        return body
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise HTTPException(400, f"expected an object with {', '.join(known)}")
    fields = cast("dict[str, Any]", found)  # of JSON
    for name in fields:
        if name not in known:
            raise HTTPException(400, f"{name}: unknown field; known are {', '.join(known)}")
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise HTTPException(400, "half of a surrogate pair is no text") from error
    return fields


def _is_object(value: Any) -> bool:
    try:
        return json.dumps(value, allow_nan=False).startswith("{")
    except ValueError:
        return False


def _texts(value: object) -> bool:
    texts = cast("list[object]", value) if isinstance(value, list) else []
    return bool(texts) and all(isinstance(one, str) and one for one in texts)


def _whole(text: str | None, name: str, low: int, high: int) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or not text.isascii() or not low <= int(text) <= high:
        raise HTTPException(400, f"{name}: expected a whole number from {low} to {high}, found {text[:50]}")
    return int(text)


def _info_record(rollout_id: str, attempt: int, info: dict[str, Any], call_ids: list[str], now_ns: int) -> bytes:
    """An OTLP/JSON request with a log record that adds info to a rollout."""
    attributes: list[dict[str, Any]] = [
        {"key": sc.ROLLOUT_ID, "value": {"stringValue": rollout_id}},
        {"key": sc.ROLLOUT_ATTEMPT, "value": {"intValue": str(attempt)}},
        {"key": sc.INFO, "value": {"stringValue": json.dumps(info)}},
        {"key": sc.INFO_AT, "value": {"intValue": str(now_ns)}},
    ]
    if call_ids:
        values = [{"stringValue": call_id} for call_id in call_ids]
        attributes.append({"key": sc.INFO_CALL_IDS, "value": {"arrayValue": {"values": values}}})
    log = {"eventName": sc.INFO, "attributes": attributes}
    return json.dumps(
        {"resourceLogs": [{"scopeLogs": [{"scope": {"name": "spanmill"}, "logRecords": [log]}]}]}
    ).encode()


def _json(content: Any) -> Response:
    return Response(as_json(content), media_type=JSON)
