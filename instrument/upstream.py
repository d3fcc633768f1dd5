"""The model server behind the gateway: how it is asked, and which headers go on in either direction.

It is asked by aiohttp, whose parser is C and which sends a request in one piece: a short call costs 0.07 ms of CPU that
way, 1.0 by httpx, 0.8 by httpcore, 0.6 by niquests, where a whole passage may cost 2.
"""

import asyncio
from asyncio import Task
from collections.abc import Iterable
from typing import Final

from aiohttp import ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from yarl import URL

from spanmill.instrument.vllm.requests import inner_key

Headers = list[tuple[str, str]]
RawHeaders = list[tuple[bytes, bytes]]

CONNECT_S: Final = 10.0
KEPT_S: Final = 4.0
"""How long a connection is kept idle: vLLM hangs up after five seconds."""

MAX_HEADER: Final = 2**16
LENGTH: Final = "content-length"
HOP: Final = frozenset(
    (
        "connection",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""Headers of one connection, or that are made anew for the next."""

AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add where the client sent none."""


class ClientLeft(Exception):
    """The client went away before its answer was there."""


class Upstream:
    """The connections to the model server at `url`, between `async with` and its end."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: ClientSession

    async def __aenter__(self) -> "Upstream":
        self._session = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=KEPT_S),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_S),  # an answer may take as long as its client waits
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=AUTOMATIC,
            max_line_size=MAX_HEADER,
            max_field_size=MAX_HEADER,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(
        self, method: str, path: str, headers: Headers, content: bytes, leaving: "Task[None]"
    ) -> ClientResponse:
        """The answer to a request, as far as its headers; from then on `leaving` closes it.

        Raises ClientLeft if `leaving` ends first, so that the engine stops, and aiohttp's ClientError.
        """
        sending = asyncio.ensure_future(self._send(method, URL(self._url + path, encoded=True), headers, content))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientLeft
            answer = sending.result()
        finally:
            sending.cancel()
        leaving.add_done_callback(lambda _: answer.close())
        return answer

    async def _send(self, method: str, url: URL, headers: Headers, content: bytes) -> ClientResponse:
        return await self._session.request(method, url, headers=headers, data=content or None, allow_redirects=False)


def request_headers(pairs: Iterable[tuple[str, str]]) -> Headers:
    """For the server: without those of the connection, and with its own key in place of one that names a rollout."""
    return [(name, _own_key(name, value)) for name, value in pairs if name not in HOP and name != LENGTH]


def _own_key(name: str, value: str) -> str:
    prefix = {"authorization": "Bearer ", "x-api-key": ""}.get(name)
    key = None if prefix is None else inner_key(value.removeprefix(prefix))
    return value if key is None else f"{prefix}{key}"


def answer_headers(answer: ClientResponse, *, is_whole: bool) -> RawHeaders:
    """For the client; with the length of the body only if that goes on as it is and `is_whole`."""
    names = ((name.lower(), value) for name, value in answer.raw_headers)
    dropped = HOP if is_whole else HOP | {LENGTH}
    return [(name, value) for name, value in names if name.decode("latin-1") not in dropped]
