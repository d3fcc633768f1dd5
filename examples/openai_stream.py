"""The async `openai` client, three questions at once, each answer streamed; the last one is given up half way."""

import asyncio
import os
import sys

from openai import AsyncOpenAI


async def ask(client: AsyncOpenAI, question: str, *, most: int) -> str:
    """The first chunks of the answer as text."""
    text = ""
    stream = await client.chat.completions.create(
        model=os.environ["MODEL"], messages=[{"role": "user", "content": question}], max_tokens=48, stream=True
    )
    async with stream:
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            most -= 1
            if most == 0:
                break
    return text


async def main(question: str) -> None:
    """Print what came."""
    async with AsyncOpenAI() as client:
        texts = await asyncio.gather(
            *(ask(client, f"{n}: {question}", most=most) for n, most in enumerate((99, 99, 5)))
        )
    print(texts)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
