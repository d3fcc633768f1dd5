"""A shopping assistant that calls tools until it has an answer: an ordinary agent, which knows nothing of spanmill.

    agent.py QUESTION

It uses the `openai` client (`OPENAI_BASE_URL` says where the model is) and is traced as agents are: OpenTelemetry, with
OpenInference's instrumentor. The one thing that it does for training is to ask the engine for token ids and log
probabilities. Prints the answer and the tools it used as a line of JSON.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

PROMPT = "You are a shopping assistant. Use the tools, then answer in one sentence."
PRICES = {"apple": 32, "cherry": 5, "grape": 29, "melon": 41, "pear": 26}
MOST_TURNS = 8


def lookup(item: str) -> str:
    """The price of an item, as JSON."""
    return json.dumps({"price": PRICES[item]} if item in PRICES else {"error": "no such item"})


def add(a: int, b: int) -> str:
    """The sum."""
    return str(a + b)


TOOLS: dict[str, Callable[..., str]] = {"lookup": lookup, "add": add}


def described(name: str, text: str, **properties: dict[str, str]) -> dict[str, Any]:
    """A tool as the model is told of it."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


TOOL_DEFINITIONS: list[Any] = [
    described("lookup", "Look up the price of an item.", item={"type": "string", "description": "name of the item"}),
    described("add", "Add two integers.", a={"type": "integer"}, b={"type": "integer"}),
]


def run(client: OpenAI, question: str, tracer: Any) -> dict[str, Any]:
    """Ask the model, do what it wants done, and ask again, until it answers."""
    messages: list[Any] = [{"role": "system", "content": PROMPT}, {"role": "user", "content": question}]
    used: list[str] = []
    for _ in range(MOST_TURNS):
        answer = client.chat.completions.create(
            model="tiny",
            messages=messages,
            tools=TOOL_DEFINITIONS,
            temperature=1.0,
            max_tokens=96,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )
        message: Any = answer.choices[0].message
        if not message.tool_calls:
            return {"answer": message.content, "tools": used}
        asked: dict[str, Any] = {"role": "assistant", "content": message.content or "", "tool_calls": []}
        messages.append(asked)
        for call in message.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            asked["tool_calls"].append(
                {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}
            )
            with tracer.start_as_current_span(f"execute_tool {name}", attributes={"gen_ai.tool.call.id": call.id}):
                result = TOOLS[name](**json.loads(arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            used.append(name)
    raise RuntimeError(f"no answer within {MOST_TURNS} turns")


def main() -> None:
    """Answer the question that was given, traced."""
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    OpenAIInstrumentor().instrument(tracer_provider=provider)
    tracer = provider.get_tracer("shop-agent")
    with tracer.start_as_current_span("shopper", attributes={"openinference.span.kind": "AGENT"}):
        result = run(OpenAI(), sys.argv[1], tracer)
    provider.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
