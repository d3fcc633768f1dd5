"""A dataset as it looks in use: an order desk's agent over eight policy versions, with what goes wrong in practice.

Made of spans, by the product's own path, so that a page shows nothing that could not come of real ones. The numbers are
drawn from a seed, the texts written here; the tokenizer is trained on them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spanmill import semconv as sc
from spanmill.adapters import adapt
from spanmill.triplets.records import FloatArray, Span, Value
from spanmill.triplets.writer import DatasetWriter

SYSTEM: Final = (
    "You work at the order desk of a mail-order shop for garden tools. Look orders up before you promise anything, "
    "refund only what arrived broken or not at all, and answer the customer in two sentences at most."
)
PROBLEMS: Final = (
    ("The spade I ordered came with a cracked handle. I would like my money back.", "delivered", "damaged", True),
    ("Where is my order? I was promised the hedge shears for last Friday.", "in transit", "late", False),
    ("I changed my mind about the wheelbarrow, it does not fit into our shed.", "delivered", "regretted", False),
    ("The parcel arrived open and the watering can was missing.", "delivered", "missing", True),
    ("You charged me twice for the same set of plant pots!", "delivered", "charged twice", True),
    ("Can I still change the address of my order? We are moving next week.", "packed", "address", False),
)
T0: Final = 1_780_000_000 * 10**9
MS: Final = 10**6
VERSIONS: Final = 8
GROUP: Final = 8


@dataclass
class Desk:
    """What a rollout is drawn with."""

    rng: np.random.Generator
    tokenizer: Any


def write_desk(folder: Path, rollouts: int = 384) -> Path:
    """Writes `folder`/data and `folder`/tokenizer.json; returns the dataset's path."""
    folder.mkdir(parents=True, exist_ok=True)
    desk = Desk(np.random.default_rng(7), make_tokenizer())
    desk.tokenizer.save(str(folder / "tokenizer.json"))
    with DatasetWriter(folder / "data") as writer:
        writer.write(adapt([span for n in range(rollouts) for span in rollout(desk, n, rollouts)]).rollouts)
    return folder / "data"


def make_tokenizer() -> Any:
    """A byte-level BPE of the texts here, with ChatML's marks."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [SYSTEM, *(told for told, *_ in PROBLEMS), *map(answer, PROBLEMS), *map(promise, PROBLEMS)]
    texts += [tool_call("lookup_order", n) for n in (4711, 1234)] + [lookup(problem, 4711) for problem in PROBLEMS]
    texts += ["assistant\n", "user\n", "system\n", "tool\n"]
    tokenizer.train_from_iterator(texts * 4, trainer)
    return tokenizer


def answer(problem: tuple[str, str, str, bool]) -> str:
    """What a good clerk says."""
    _, status, kind, refund = problem
    if refund:
        return f"I am sorry about that: your order is {kind}, so I have refunded it. The money is back in three days."
    return f"I have looked it up: your order is {status}. I cannot refund it, but the parcel service will write to you."


def promise(problem: tuple[str, str, str, bool]) -> str:
    """What one says who has looked nothing up."""
    return "Do not worry, I will refund everything at once and send you a new one for free. Have a nice day!"


def tool_call(name: str, order: int) -> str:
    """A call as the model writes it."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"order": {order}}}}}</tool_call>'


def lookup(problem: tuple[str, str, str, bool], order: int) -> str:
    """What the shop's system knows."""
    return json.dumps({"order": order, "status": problem[1], "note": problem[2], "paid": "34.90"})


def rollout(desk: Desk, number: int, of: int) -> Iterator[Span]:
    """The spans of one rollout: the agent's, its tools', the engine's, and the judge's reward."""
    rng, group = desk.rng, number // GROUP
    version = number * VERSIONS // of
    problem = PROBLEMS[group % len(PROBLEMS)]
    order = 4000 + group
    careful = bool(rng.random() < 0.25 + 0.09 * version)
    steps: list[tuple[str, str]] = []
    if careful:
        steps.append((tool_call("lookup_order", order), lookup(problem, order)))
        if problem[3]:
            steps.append((tool_call("refund", order), json.dumps({"order": order, "refunded": "34.90"})))
    steps.append((answer(problem) if careful else promise(problem), ""))
    made = _Spans(number, version, group, problem[2])
    user = f"Order {order}. {problem[0]}"
    prompt = _chat(desk, ("system", SYSTEM), ("user", user))
    messages: list[dict[str, Any]] = [_said("system", SYSTEM), _said("user", user)]
    for turn, (text, result) in enumerate(steps):
        ids = _ids(desk, text) + _ids(desk, "<|im_end|>")
        yield from made.call(
            turn, prompt, ids, logprobs(desk, len(ids), version), messages, text, turn == 0 and number % 150 == 133
        )
        # Some harnesses render the tool call again, without its spaces: the next prompt is another text.
        again = text.replace('": ', '":') if number % 11 == 5 and turn == 0 else text
        kept = ids if again == text else _ids(desk, again) + _ids(desk, "<|im_end|>")
        prompt = prompt + kept + _ids(desk, "\n") + _chat(desk, ("tool", result))
        messages = [*messages, _said("assistant", text), _said("tool", result)]
        if result:
            yield made.tool(turn, "refund" if "refund" in text else "lookup_order", failed=number % 17 == 3)
    unrewarded = number % 41 == 7
    score = float(np.clip(round(abs((0.9 if careful else 0.1) + rng.normal(0, 0.08)), 2), 0, 1))
    yield from made.ending("failed" if number % 17 == 3 else "succeeded", None if unrewarded else score)


def logprobs(desk: Desk, count: int, version: int) -> FloatArray:
    """Mostly sure, surprised at some words, and less so with every version."""
    sure = desk.rng.exponential(0.04, count)
    wide = desk.rng.exponential(2.2 - 0.15 * version, count)
    drawn = -np.where(desk.rng.random(count) < 0.22 - 0.012 * version, wide, sure)
    return drawn.astype(np.float32).astype(np.float64)


def _ids(desk: Desk, text: str) -> list[int]:
    return desk.tokenizer.encode(text, add_special_tokens=False).ids


def _chat(desk: Desk, *messages: tuple[str, str]) -> list[int]:
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return _ids(desk, told + "<|im_start|>assistant\n")


def _said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


class _Spans:
    """The spans of one rollout, one after the other."""

    def __init__(self, number: int, version: int, group: int, task: str) -> None:
        self._number, self._version = number, version
        self._trace = f"{number + 1:032x}"
        self._start = self._now = T0 + number * 40_000 * MS
        self._count = 0
        self._labels: dict[str, Value] = {
            sc.ROLLOUT_ID: f"desk/v{version}/{group:03d}-{number % GROUP}",
            sc.GROUP_ID: f"desk-{group:03d}",
            sc.GROUP_SIZE: GROUP,
            sc.TASK_ID: f"order {task}",
            sc.MODE: "train",
        }

    def _span(self, name: str, parent: str, start: int, end: int, told: dict[str, Value], service: str) -> Span:
        self._count += 1
        own = f"{(self._number + 1) * 100 + self._count:016x}"
        return Span(self._trace, own, parent, name, 1, start, end, told, {"service.name": service}, "desk")

    @property
    def _root(self) -> str:
        return f"{(self._number + 1) * 100:016x}"

    def call(
        self,
        turn: int,
        prompt: list[int],
        ids: list[int],
        logprobs: Any,
        messages: list[dict[str, Any]],
        text: str,
        broken: bool,
    ) -> Iterator[Span]:
        """What agent and engine tell of one call; a broken one lost a logprob on the way."""
        start, end = self._now, self._now + len(ids) * 24 * MS
        told: dict[str, Value] = {
            sc.GEN_AI_OPERATION: "chat",
            sc.GEN_AI_REQUEST_MODEL: "desk-1.7b",
            sc.GEN_AI_RESPONSE_ID: f"chatcmpl-{self._number:04d}-{turn}",
            sc.GEN_AI_FINISH_REASONS: ["stop"],
            sc.GEN_AI_TEMPERATURE: 0.8,
            sc.GEN_AI_TOP_P: 0.95,
        }
        talk: dict[str, Value] = {
            sc.GEN_AI_INPUT_MESSAGES: json.dumps(messages),
            sc.GEN_AI_OUTPUT_MESSAGES: json.dumps([_said("assistant", text) | {"finish_reason": "stop"}]),
        }
        agents = self._span("chat desk-1.7b", self._root, start, end, told | talk, "agent")
        yield agents
        engines: dict[str, Value] = {
            sc.CAPTURE: "engine",
            sc.PROMPT_TOKEN_IDS: np.array(prompt, np.int32),
            sc.RESPONSE_TOKEN_IDS: np.array(ids, np.int32),
            sc.RESPONSE_LOGPROBS: logprobs[: len(ids) - broken],
            sc.LOGPROBS_MODE: "processed",
            sc.POLICY_VERSION: str(self._version),
        }
        yield self._span("chat desk-1.7b", agents.span_id, start + 12 * MS, end - 5 * MS, told | engines, "vllm")
        self._now = end + 15 * MS

    def tool(self, turn: int, name: str, failed: bool) -> Span:
        """A tool's span."""
        start = self._now
        self._now += (180 + 90 * turn) * MS
        told: dict[str, Value] = {sc.GEN_AI_OPERATION: "execute_tool", "gen_ai.tool.name": name}
        made = self._span(f"execute_tool {name}", self._root, start, self._now, told, "agent")
        made.status = 2 if failed else 0
        self._now += 10 * MS
        return made

    def ending(self, status: str, score: float | None) -> Iterator[Span]:
        """The reward, and the agent's own span that all others stand below."""
        if score is not None:
            told: dict[str, Value] = {sc.REWARD_VALUE: score}
            yield self._span(sc.REWARD, self._root, self._now, self._now, told, "agent")
        told = self._labels | {
            sc.ROLLOUT_STATUS: status,
            sc.GEN_AI_OPERATION: "invoke_agent",
            sc.GEN_AI_AGENT_NAME: "desk",
        }
        root = self._span("invoke_agent desk", "", self._start, self._now + 20 * MS, told, "agent")
        root.span_id = self._root
        yield root
