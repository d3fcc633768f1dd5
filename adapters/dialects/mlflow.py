"""MLflow: every attribute is JSON text; autologged spans hold the raw request and the raw answer."""

from typing import Final

from spanmill import semconv as sc
from spanmill.adapters.messages import as_object
from spanmill.adapters.raw import add_streamed, apply_parameters, is_answer, read_answer
from spanmill.adapters.shapes import answer, conversation, tool_definitions
from spanmill.adapters.values import identifier, integer, read_json, text
from spanmill.triplets.records import Call, Json, Span

INPUTS: Final = "mlflow.spanInputs"
OUTPUTS: Final = "mlflow.spanOutputs"
MODEL: Final = "mlflow.llm.model"
TOOLS: Final = "mlflow.chat.tools"
CHUNK: Final = "mlflow.chunk.item."
CHUNK_VALUE: Final = "mlflow.chunk.value"
USAGE: Final = "mlflow.chat.tokenUsage"
TYPES: Final = frozenset({"chat_model", "llm"})
ANSWERS: Final = (OUTPUTS,)


def recognises(span: Span) -> bool:
    """A span of type CHAT_MODEL or LLM."""
    kind = text(span.attributes.get(sc.MLFLOW_SPAN_TYPE))
    return kind is not None and kind.strip('"').lower() in TYPES


def _chunks(span: Span) -> list[Json]:
    """The chunks of a streamed answer, which stand raw in events; [] if one of them is missing or cut."""
    made: dict[str, Json] = {}
    for event in span.events:
        if event.name.startswith(CHUNK):
            damaged: list[str] = []
            made[event.name] = read_json(event.attributes, CHUNK_VALUE, damaged)
            if damaged:
                return []
    names = [f"{CHUNK}{i}" for i in range(len(made))]
    return [made[n] for n in names] if all(n in made for n in names) else []


def read(span: Span) -> list[Call]:
    """A Call per choice of the raw answer, else the one message that the outputs are."""
    a = span.attributes
    damaged: list[str] = []
    asked, said = read_json(a, INPUTS, damaged), read_json(a, OUTPUTS, damaged)
    body = as_object(asked)
    usage = as_object(read_json(a, USAGE, damaged))
    model, tools = text(read_json(a, MODEL, damaged)), body.get("tools") or read_json(a, TOOLS, damaged)
    if is_answer(said):
        add_streamed(said, _chunks(span))
        calls = read_answer(span, "mlflow", as_object(said))
    else:
        response = answer(as_object(said).get("message", said))
        calls = [Call(span, "mlflow", "text", choice=0, response_id=identifier(as_object(said).get("id")))]
        calls[0].response = response
    for call in calls:
        apply_parameters(call, body)
        call.model = call.model or model or text(body.get("model"))
        call.messages = conversation(body.get("messages", body.get("input", asked)), body.get("instructions"))
        call.tools = tool_definitions(tools)
        if call.usage_prompt is None:
            call.usage_prompt = integer(usage.get("input_tokens"), foreign=True)
        if call.usage_response is None:
            call.usage_response = integer(usage.get("output_tokens"), foreign=True)
        if OUTPUTS in damaged:
            call.faults += (("truncated_attribute", f"{OUTPUTS}: JSON that does not parse"),)
        elif damaged:
            call.flags |= {"truncated_attribute"}
    return calls
