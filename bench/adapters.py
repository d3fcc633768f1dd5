"""Measures the pure part: what a span, a token and a turn cost between decoded spans and rows, and how that grows.

    bench/adapters.py [--quick]

Figures are CPU time; a growth of 1.0 means that twice the input takes twice the time. The peer, in the same process and
run, is a pass over the same numbers with numpy: every prompt and answer hashed once.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np

from spanmill.adapters import adapt
from spanmill.triplets.records import Span, Value

ANSWER = 256


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of the sizes")
    scale = 4 if parser.parse_args().quick else 1
    rows = [
        ("rollouts of 8 turns, 2,048 + 256 ids", rollouts, 200 // scale, tokens_of),
        ("one rollout of many turns, 16 ids each", chain, 1000 // scale, tokens_of),
        ("text-only calls of 60 messages", text_calls, 500 // scale, len),
        ("one trace of many spans, one call in ten", wide_trace, 10_000 // scale, len),
    ]
    print(f"{'':44}{'unit':>7}{'n':>9}{'us/unit':>9}{'at 2n':>9}{'growth':>8}{'of hashing':>12}")
    for name, make, n, units in rows:
        small, large = make(n), make(2 * n)
        one, two = cost(adapt, small), cost(adapt, large)
        per, per2 = 1e6 * one / units(small), 1e6 * two / units(large)
        unit = "token" if units is tokens_of else "span"
        peer = cost(hashed, small) if units is tokens_of else 0.0
        ratio = f"{one / peer:11.1f}x" if peer else ""
        print(f"{name:44}{unit:>7}{units(small):>9}{per:>9.3f}{per2:>9.3f}{per2 / per:>8.2f}{ratio:>12}")


def cost(work: Callable[[Sequence[Span]], object], spans: Sequence[Span]) -> float:
    """CPU seconds of the better of two runs."""
    taken: list[float] = []
    for _ in range(2):
        start = time.process_time()
        work(spans)
        taken.append(time.process_time() - start)
    return min(taken)


def hashed(spans: Sequence[Span]) -> int:
    """The peer: each array of a span summed once, with weights."""
    total = 0
    for span in spans:
        for value in span.attributes.values():
            if isinstance(value, np.ndarray) and value.dtype.kind == "i" and value.size:
                total ^= int(np.cumsum(value.astype(np.uint64) * np.uint64(31))[-1])
    return total


def tokens_of(spans: Sequence[Span]) -> int:
    """Prompt and answer ids in the spans."""
    arrays = (v for s in spans for v in s.attributes.values() if isinstance(v, np.ndarray) and v.dtype.kind == "i")
    return sum(a.size for a in arrays)


def rollouts(n: int) -> list[Span]:
    """Rollouts of eight turns in which each prompt extends the call before, 2,048 prompt ids on average."""
    return [span for r in range(n) for span in _rollout(r, 8, 1152, ANSWER)]


def chain(turns: int) -> list[Span]:
    """One rollout of many short turns: the prompts grow to 16 ids a turn."""
    return _rollout(0, turns, 16, 16)


def _rollout(number: int, turns: int, first: int, answer: int) -> list[Span]:
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 150_000, first + turns * answer)
    trace, root = f"{number + 1:032x}", f"{number + 1:016x}"
    spans = [_span(trace, root, "", 0, {"spanmill.rollout.id": f"r{number}", "spanmill.rollout.status": "succeeded"})]
    for turn in range(turns):
        end = first + turn * answer
        values: dict[str, Value] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "policy-7b",
            "gen_ai.response.id": f"chatcmpl-{number}-{turn}",
            "gen_ai.response.finish_reasons": ["stop"],
            "spanmill.capture": "engine",
            "spanmill.prompt.token_ids": tokens[:end],
            "spanmill.prompt.token_count": end,
            "spanmill.response.token_ids": tokens[end : end + answer],
            "spanmill.response.token_count": answer,
            "spanmill.response.logprobs": -rng.random(answer),
        }
        spans.append(_span(trace, f"{number:08x}{turn + 1:08x}", root, turn + 1, values))
    return spans


def text_calls(n: int) -> list[Span]:
    """Calls that carry sixty messages as JSON text and no ids."""
    messages = ",".join(
        f'{{"role":"{"user" if i % 2 else "assistant"}","parts":[{{"type":"text","content":"message {i} of sixty"}}]}}'
        for i in range(60)
    )
    values: dict[str, Value] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy-7b",
        "gen_ai.input.messages": f"[{messages}]",
        "gen_ai.response.finish_reasons": ["stop"],
    }
    return [
        _span(f"{i + 1:032x}", f"{i + 1:016x}", "", i, {**values, "gen_ai.response.id": f"chatcmpl-{i}"})
        for i in range(n)
    ]


def wide_trace(n: int) -> list[Span]:
    """One trace: chains of ten spans under one root, a call at the end of each."""
    trace, root = f"{1:032x}", f"{1:016x}"
    spans = [_span(trace, root, "", 0, {"spanmill.rollout.id": "r"})]
    for i in range(n):
        parent = root if i % 10 == 0 else f"{i + 1:016x}"
        values: dict[str, Value] = {}
        if i % 10 == 9:
            values = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.id": f"c{i}"}
        spans.append(_span(trace, f"{i + 2:016x}", parent, i, values))
    return spans


def _span(trace: str, ident: str, parent: str, at: int, values: dict[str, Value]) -> Span:
    start = 1_780_000_000_000_000_000 + at * 1_000_000
    return Span(trace, ident, parent, "", 1, start, start + 900_000, values, {"service.name": "agent"})


if __name__ == "__main__":
    main()
