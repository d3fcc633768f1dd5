"""Makes `demo/answers.jsonl`: what a real vLLM answered to each conversation of a recorded agent, unedited.

    python demo/record_answers.py > demo/answers.jsonl

The recording is that of tests/conformance/recorded/openinference_openai. Of it the whole (not streamed) answers of the
conversations that have several turns are taken: a line of JSON each, `{"messages", "tools", "answer"}`.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONFORMANCE = ROOT / "tests" / "conformance"
RECORDING = CONFORMANCE / "recorded" / "openinference_openai"


def answers() -> Iterator[dict[str, Any]]:
    """Every answered conversation, in the order in which the engine began to answer."""
    sys.path.insert(0, str(CONFORMANCE))
    from replay import read_requests
    from spanmill.collector.decode import decode_traces

    found: dict[str, dict[str, Any]] = {}
    for body in read_requests(RECORDING / "traces.binpb"):
        for span in decode_traces(body).spans:
            if span.name == "ChatCompletion":
                request = json.loads(str(span.attributes["input.value"]))
                answer = json.loads(str(span.attributes["output.value"]))
                line = {"messages": request["messages"], "tools": request["tools"], "answer": answer}
                if "stream" not in request and "n" not in request:
                    found[answer["id"]] = line
    truth = json.loads((RECORDING / "truth.json").read_text())
    yield from (found[one["response_id"]] for one in truth["generations"] if one["response_id"] in found)


if __name__ == "__main__":
    for line in answers():
        print(json.dumps(line, ensure_ascii=False, separators=(",", ":")))
