# pyright: basic, reportMissingImports=false
"""Sixteen rollouts at once in one process, each with clients that are pointed at it by URL, by key or by headers.

usage: many_rollouts.py RUN URL MODEL
"""

import asyncio
import sys
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

import spanmill

RUN, URL, MODEL = sys.argv[1:]


def ask(owner: str, number: int) -> dict[str, Any]:
    """A request that says whose it is."""
    return {"model": MODEL, "messages": [{"role": "user", "content": f"{owner} asks {number}"}], "max_tokens": 8}


def ask_from_afar(client: OpenAI, owner: str) -> None:
    """One more, in a thread."""
    client.chat.completions.create(**ask(owner, 2))


async def agent(number: int) -> None:
    """Five calls of one rollout."""
    async with spanmill.rollout(f"{RUN}/{number}", attempt=number % 2, base_url=f"{URL}/v1") as r:
        by_url = {"base_url": r.base_url, "api_key": "none"}
        by_key = {"base_url": f"{URL}/v1", "api_key": r.api_key}
        by_headers = {"base_url": f"{URL}/v1", "api_key": "none", "default_headers": r.headers}
        options: dict[str, Any] = (by_url, by_key, by_headers)[number % 3]
        async with AsyncOpenAI(**options) as client:
            stream = await client.chat.completions.create(**ask(r.id, 0), stream=True)
            async for _ in stream:
                pass
            await client.chat.completions.create(**ask(r.id, 1))
        with OpenAI(**options) as client:
            await asyncio.to_thread(ask_from_afar, client, r.id)
        server = {**options, "base_url": options["base_url"].removesuffix("/v1")}
        async with AsyncAnthropic(**server) as client:
            await client.messages.create(**ask(r.id, 3))
            async with client.messages.stream(**ask(r.id, 4)) as stream:
                await stream.until_done()
        r.reward(number)
        r.metrics["calls"] = 5


async def main() -> None:
    """All of them."""
    await asyncio.gather(*map(agent, range(16)))


if __name__ == "__main__":
    asyncio.run(main())
