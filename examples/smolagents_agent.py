"""Hugging Face smolagents: an agent that calls a tool."""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

PRICES = {"apple": 32, "cherry": 5, "grape": 29, "melon": 41, "pear": 26}


@tool
def lookup(item: str) -> str:
    """Look up the price of an item.

    Args:
        item: its name.

    """
    return str(PRICES.get(item, "unknown"))


def main(question: str) -> str:
    """The agent's answer."""
    model = OpenAIServerModel(os.environ["MODEL"], os.environ["OPENAI_BASE_URL"], max_tokens=64)
    agent = ToolCallingAgent([lookup], model, max_steps=3)
    agent.prompt_templates["system_prompt"] = "Use the tools."  # its own takes more than a small model's context
    return str(agent.run(question))


if __name__ == "__main__":
    print(main(sys.argv[1]))
