"""LangChain and LangGraph: an agent with two tools, which run in a thread pool."""

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

PRICES = {"apple": 32, "cherry": 5, "grape": 29, "melon": 41, "pear": 26}


@tool
def lookup(item: str) -> str:
    """Look up the price of an item."""
    return str(PRICES.get(item, "unknown"))


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def main(question: str) -> str:
    """The agent's answer."""
    agent = create_react_agent(ChatOpenAI(model=os.environ["MODEL"], max_tokens=64), [lookup, add])
    try:
        done = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 8})
    except GraphRecursionError:
        return "no answer within eight steps"
    return done["messages"][-1].content


if __name__ == "__main__":
    print(main(sys.argv[1]))
