"""Pydantic AI: an agent with a tool."""

import os
import sys

from pydantic_ai import Agent
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.usage import UsageLimits

PRICES = {"apple": 32, "cherry": 5, "grape": 29, "melon": 41, "pear": 26}
shopper = Agent(f"openai-chat:{os.environ['MODEL']}", instructions="Use the tools.", model_settings={"max_tokens": 64})


@shopper.tool_plain
def lookup(item: str) -> str:
    """Look up the price of an item."""
    return str(PRICES.get(item, "unknown"))


def main(question: str) -> str:
    """The agent's answer."""
    try:
        return shopper.run_sync(question, usage_limits=UsageLimits(request_limit=4)).output
    except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
        return f"no answer: {error}"


if __name__ == "__main__":
    print(main(sys.argv[1]))
