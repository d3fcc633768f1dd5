"""The OpenAI Agents SDK over chat completions."""

import os
import sys

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded

PRICES = {"apple": 32, "cherry": 5, "grape": 29, "melon": 41, "pear": 26}


@function_tool
def lookup(item: str) -> str:
    """Look up the price of an item."""
    return str(PRICES.get(item, "unknown"))


def main(question: str) -> str:
    """The agent's answer."""
    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)  # it would be sent to OpenAI
    settings = ModelSettings(max_tokens=64)
    agent = Agent("shopper", "Use the tools.", model=os.environ["MODEL"], tools=[lookup], model_settings=settings)
    try:
        return Runner.run_sync(agent, question, max_turns=4).final_output
    except MaxTurnsExceeded:
        return "no answer within four turns"


if __name__ == "__main__":
    print(main(sys.argv[1]))
