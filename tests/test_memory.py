import asyncio
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict, MessageToJson
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import spanmill
from replay import read_requests
from spanmill import Reward, Rollout, Triplet, adapt
from spanmill.collector.decode import decode_traces

RECORDING = Path(__file__).parent / "conformance" / "recorded" / "openinference_openai" / "traces.binpb"
ATTRIBUTES: dict[str, Any] = {
    "spanmill.rollout.id": "r1",
    "spanmill.capture": "client",
    "spanmill.prompt.token_ids": (1, 2, 3),
    "spanmill.response.token_ids": (4, 5),
    "spanmill.response.logprobs": (-0.5, -0.25),
    "gen_ai.operation.name": "chat",
    "gen_ai.response.id": "c1",
    "gen_ai.response.finish_reasons": ("stop",),
}


def plain(rollouts: Any) -> Any:
    """Rollouts, rows included, as values that compare by content; of an array also its type."""
    return [_plain(asdict(one)) for one in rollouts]


def _plain(found: Any) -> Any:
    if isinstance(found, np.ndarray):
        array = cast("np.ndarray[Any, np.dtype[Any]]", found)
        return [str(array.dtype), *array.tolist()]
    if isinstance(found, dict):
        return {k: _plain(v) for k, v in cast("dict[str, Any]", found).items()}
    if isinstance(found, (list, tuple)):
        return [_plain(v) for v in cast("list[Any]", found)]
    return found


def without_times(rows: Any) -> Any:
    """What `plain` gives, without start and end, of the spans in its outline too."""
    for row in rows:
        for one in (row, *row["triplets"]):
            del one["started_at"], one["ended_at"]
        row["metadata"] = re.sub(r'"(start|end)_us":\d+,?', "", row["metadata"])
    return rows


@pytest.fixture
def spans() -> tuple[ReadableSpan, ...]:
    """An agent's span with a link, an event and a call under it, as another program's SDK finished them."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("agent")
    other = tracer.start_span("other")
    links = [trace.Link(other.get_span_context(), {"why": "earlier"})]
    with tracer.start_as_current_span(
        "invoke_agent", links=links, attributes={"gen_ai.operation.name": "invoke_agent"}
    ):
        with tracer.start_as_current_span("chat", attributes=ATTRIBUTES, kind=trace.SpanKind.CLIENT) as call:
            call.add_event("spanmill.reward", {"spanmill.reward.value": 0.5})
        with pytest.raises(ValueError), tracer.start_as_current_span("tool"):
            raise ValueError("broken")
    return exporter.get_finished_spans()


def in_form(form: str, spans: tuple[ReadableSpan, ...]) -> object:
    """The spans as something else that they may be handed over as."""
    request = encode_spans(spans)
    body = request.SerializeToString()
    forms: dict[str, object] = {
        "request": request,
        "data": TracesData.FromString(body),
        "bytes": body,
        "bytearray": bytearray(body),
        "json": otlp_json(spans),
        "text": json.dumps(otlp_json(spans)),
        "mixed": [spans[0], [encode_spans(spans[1:2])], (encode_spans(spans[2:]).SerializeToString(),)],
        "iterator": iter(spans[::-1]),
    }
    return forms[form]


FORMS = ("request", "data", "bytes", "bytearray", "json", "text", "mixed", "iterator")


def otlp_json(spans: Any) -> Any:
    """The spans as an OTLP/JSON request: ids in hex, which protobuf's own JSON has in base64."""
    request = MessageToDict(encode_spans(spans))
    for group in request["resourceSpans"]:
        for scope in group["scopeSpans"]:
            for span, sdk in zip(scope["spans"], spans, strict=True):
                span["traceId"] = f"{sdk.context.trace_id:032x}"
                span["spanId"] = f"{sdk.context.span_id:016x}"
                if sdk.parent:
                    span["parentSpanId"] = f"{sdk.parent.span_id:016x}"
                for link, own in zip(span.get("links", ()), sdk.links, strict=True):
                    link["traceId"] = f"{own.context.trace_id:032x}"
                    link["spanId"] = f"{own.context.span_id:016x}"
    return request


@pytest.mark.parametrize("form", FORMS)
def test_the_same_spans_in_any_form_give_the_same_rows(form: str, spans: tuple[ReadableSpan, ...]) -> None:
    """SDK spans, requests as messages, bytes and JSON, and lists that mix them, give rows that are equal."""
    assert plain(adapt(spans)) == plain(adapt(in_form(form, spans)))


def test_rows_hold_what_the_spans_recorded(spans: tuple[ReadableSpan, ...]) -> None:
    """Ids, logprobs, agent and reward are those of the spans."""
    (rollout,) = adapt(spans)
    (episode,) = rollout.episodes
    assert ("r1", 0, 0.5, 1) == (rollout.rollout_id, rollout.attempt, rollout.triplets[0].reward, rollout.num_calls)
    assert [[1, 2, 3, 4, 5], [0, 0, 0, 1, 1]] == [episode.input_ids.tolist(), episode.loss_mask.tolist()]
    assert [0.0, 0.0, 0.0, -0.5, -0.25] == (episode.logprobs.tolist() if episode.logprobs is not None else None)
    assert ("invoke_agent", "c1") == (rollout.triplets[0].agent, rollout.triplets[0].call_id)


@pytest.mark.parametrize("as_dict", [False, True])
def test_to_json_loses_only_what_it_never_held(as_dict: bool, spans: tuple[ReadableSpan, ...]) -> None:
    """Spans from `to_json()`, text or dict, give the rows of the spans; it rounds times to about a microsecond."""
    texts = [span.to_json() for span in spans]
    made = adapt([json.loads(text) for text in texts] if as_dict else texts)
    assert 5 > abs(made[0].started_at - adapt(spans)[0].started_at)
    assert without_times(plain(adapt(spans))) == without_times(plain(made))


def test_a_recording_gives_the_rows_of_its_requests() -> None:
    """Real requests, one by one as bytes, give every rollout of the recording; a mixture of forms gives the same."""
    requests = list(read_requests(RECORDING))
    whole = adapt(requests)
    count = sum(len(decode_traces(request).spans) for request in requests)
    assert (49, 12, []) == (count, len(whole), whole.stray)
    assert plain(whole) == plain(adapt([requests[4:], [requests[:4]]]))


def log_request(value: float) -> ExportLogsServiceRequest:
    """A reward for rollout r1 as a log record outside any trace."""
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add(event_name="spanmill.reward")
    record.attributes.add(key="spanmill.rollout.id").value.string_value = "r1"
    record.attributes.add(key="spanmill.reward.value").value.double_value = value
    record.time_unix_nano = 2**62
    return request


def test_log_records_are_taken_like_spans(spans: tuple[ReadableSpan, ...]) -> None:
    """A reward in a request of log records, in any form, reaches the rollout of the spans."""
    request = log_request(2.0)
    body = request.SerializeToString()
    for form in (request, body, LogsData.FromString(body)):
        assert [0.5, 2.0] == [r.value for r in adapt([spans, form])[0].rewards]


def test_options_and_rewards_are_those_of_build(spans: tuple[ReadableSpan, ...]) -> None:
    """Rewards come later than all spans; names that count are told; an impossible option is refused."""
    rewards = [Reward("r1", 3.0, name="score"), Reward("elsewhere", 1.0)]
    made = adapt(spans, rewards=rewards, reward_names=["score"])
    assert (3.0, ["unknown_rollout"]) == (made[0].reward, [row.reason for row in made.stray])
    assert [None] == [one.reward for one in adapt(spans, rewards=rewards)]
    with pytest.raises(ValueError, match="merge: expected one of prefix, none, realign, got 'all'"):
        adapt(spans, merge="all")


def test_spans_without_ids_are_stray() -> None:
    """What belongs to no rollout does not vanish: it stands in `stray` with the reason."""
    request = TracesData()
    request.resource_spans.add().scope_spans.add().spans.add(name="x", start_time_unix_nano=1)
    made = adapt([request, request])
    assert ([], ["bad_span_id"]) == (list(made), [row.reason for row in made.stray])


def test_nothing_gives_nothing() -> None:
    """No spans are no rollouts, and no error."""
    assert [([], []), ([], [])] == [(list(made), made.stray) for made in (adapt([]), adapt(b""))]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, "spans: found int 3; expected finished SDK spans"),
        (None, "spans: found NoneType None; expected finished SDK spans"),
        ([[], [b"", 2.5]], "spans[1][1]: found float 2.5; expected"),
        ("not json", "spans: found a text that is no JSON, 'not json'"),
        ("[1]", "spans: found JSON that is no object, '[1]'"),
        ([{"a": 1}], "spans[0]: found a dict with the keys a; expected"),
        ({"context": {"trace_id": "0x1"}}, "spans: found a dict that is no to_json() of a span (KeyError('span_id'))"),
        (
            ExportMetricsServiceRequest(),
            "found a protobuf opentelemetry.proto.collector.metrics.v1.ExportMetricsServic",
        ),
        (trace.INVALID_SPAN, "spans: found NonRecordingSpan"),
        (ReadableSpan("x"), "spans: found a span without ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a span's text holds its address
)
def test_what_are_no_spans_is_named(given: object, says: str) -> None:
    """A TypeError says what was found, where, and what is expected."""
    with pytest.raises(TypeError) as caught:
        adapt(given)
    assert says in str(caught.value)


@pytest.mark.parametrize("given", [b"abc", [b"\x0a\xff"]])
def test_bytes_that_are_no_request_are_named(given: Any) -> None:
    """Bytes that do not parse are a DecodeError, which is a ValueError, and says where they stand."""
    with pytest.raises(ValueError, match=r"^spans(\[0\])?: \d bytes are no OTLP request"):
        adapt(given)


def test_result_of_nothing_is_a_bare_rollout() -> None:
    """An agent that returns nothing makes a rollout of which nothing is known."""
    expected = Rollout("r", 3, "span", "unknown", "batch", 0, 0)
    returned: tuple[object, object] = (None, [])
    assert [expected, expected] == [Rollout.from_result(r, rollout_id="r", attempt=3) for r in returned]


@pytest.mark.parametrize("number", [1, 0.25, True, np.float32(0.5), np.int64(2)])
def test_result_that_is_a_number_is_the_final_reward(number: Any) -> None:
    """Int, float, bool and numpy's numbers are the final reward."""
    rollout = Rollout.from_result(number, rollout_id="r")
    seen = [(reward.value, reward.source) for reward in rollout.rewards]
    assert (float(number), [(float(number), "result")]) == (rollout.reward, seen)


def test_result_that_is_nan_is_quarantined() -> None:
    """NaN is no reward: it is kept aside with the reason."""
    rollout = Rollout.from_result(math.nan, rollout_id="r")
    assert (None, ["nonfinite_reward"]) == (rollout.reward, [row.reason for row in rollout.quarantined])


def test_result_of_spans_is_one_rollout_whatever_they_say(spans: tuple[ReadableSpan, ...]) -> None:
    """Spans that name another rollout, or none, are this rollout's, and their other content is kept."""
    rollout = Rollout.from_result([spans, log_request(2.0)], rollout_id="mine", attempt=1)
    expected = adapt([spans, log_request(2.0)])[0]
    ids = {(row.rollout_id, row.attempt) for row in (rollout, *rollout.triplets, *rollout.episodes)}
    assert {("mine", 1)} == ids
    assert (expected.reward, expected.num_calls) == (rollout.reward, rollout.num_calls)
    assert plain(expected.episodes) == [e | {"rollout_id": "r1", "attempt": 0} for e in plain(rollout.episodes)]


def test_result_keeps_spans_that_cannot_be_used() -> None:
    """A span without ids is quarantined under the rollout."""
    request = TracesData()
    request.resource_spans.add().scope_spans.add().spans.add(name="x", start_time_unix_nano=1)
    rows = Rollout.from_result(request, rollout_id="r").quarantined
    assert [("bad_span_id", "r", 0)] == [(row.reason, row.rollout_id, row.attempt) for row in rows]


def test_result_that_is_a_rollout_gets_the_id() -> None:
    """A Rollout stays what it is, under the id that was asked for, and the one handed in is not changed."""
    rollout = adapt(list(read_requests(RECORDING)))[0]
    renamed = Rollout.from_result(rollout, rollout_id="r", attempt=7)
    rows = (renamed, *renamed.triplets, *renamed.episodes, *renamed.quarantined)
    assert {("r", 7)} == {(row.rollout_id, row.attempt) for row in rows}
    back = Rollout.from_result(renamed, rollout_id=rollout.rollout_id)
    assert plain([rollout]) == plain([back])


def test_result_of_triplets_has_the_episodes_of_its_spans() -> None:
    """Triplets that came from spans make the same rows again, but for the rewards, which they have no place for."""
    for rollout in adapt(list(read_requests(RECORDING))):
        made = Rollout.from_result(rollout.triplets, rollout_id=rollout.rollout_id)
        assert plain(rollout.triplets) == plain(made.triplets)
        assert plain(rollout.episodes) == plain(made.episodes)
        counts = ("num_calls", "num_triplets", "num_episodes", "tokens_captured", "tokens_trained", "tokens_masked")
        assert [getattr(rollout, name) for name in counts] == [getattr(made, name) for name in counts]


def triplet(**given: Any) -> Triplet:
    """A Triplet as a program would make one, with lists for arrays."""
    fields: dict[str, Any] = {
        "turn": 0,
        "call_id": "c0",
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3],
        "response_logprobs": [-0.5],
        "trainable": True,
        **given,
    }
    own = {"choice": 0, "trace_id": "", "span_id": "", "ids_source": "client", "started_at": 0, "ended_at": 0}
    return Triplet("", 0, **own, dialect="mine", **fields)


def test_result_of_triplets_made_by_hand_is_merged() -> None:
    """A call whose prompt extends another becomes one Episode with it; one that must not be trained is not."""
    second = triplet(turn=1, call_id="c1", prompt_token_ids=(1, 2, 3, 9), response_token_ids=[4], reward=1.0)
    judge = triplet(turn=2, call_id="c2", prompt_token_ids=[7], trainable=False, flags=("reward_call",))
    rollout = Rollout.from_result([second, triplet(), judge], rollout_id="r")
    (episode,) = rollout.episodes
    assert [1, 2, 3, 9, 4] == episode.input_ids.tolist()
    assert [0, 0, 1, 0, 1] == episode.loss_mask.tolist()
    assert ([None, "c0", None], [True, True, False]) == (
        [t.parent_call_id for t in rollout.triplets],
        [t.trainable for t in rollout.triplets],
    )
    assert (3, 2, 1, (None, 1.0)) == (
        rollout.tokens_captured,
        rollout.tokens_trained,
        rollout.tokens_masked,
        episode.step_rewards,
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"response_logprobs": [-0.5, -0.5]}, "length_mismatch"),
        ({"response_logprobs": [math.nan]}, "nonfinite_logprob"),
        ({"prompt_token_ids": [-1]}, "bad_token_id"),
        ({"response_token_ids": ["a"]}, "bad_token_id"),
    ],
)
def test_triplets_that_contradict_themselves_are_quarantined(given: dict[str, Any], reason: str) -> None:
    """The checks of recorded calls hold for Triplets made by hand; their tokens are accounted for."""
    rollout = Rollout.from_result([triplet(**given), triplet(turn=1, call_id="c1")], rollout_id="r")
    assert ([reason], ["c1"]) == ([q.reason for q in rollout.quarantined], [t.call_id for t in rollout.triplets])
    assert (2, 1, 1) == (rollout.tokens_captured, rollout.tokens_quarantined, rollout.tokens_trained)


async def agent() -> float:
    """An agent that somebody forgot to await."""
    return 1.0


def test_a_result_that_is_nothing_of_these_is_named() -> None:
    """A TypeError says what was found and what an agent may return."""
    forgotten = agent()
    with pytest.raises(TypeError, match=r"^result: found coroutine .*None, a number, Triplets or a Rollout$"):
        Rollout.from_result(forgotten, rollout_id="r")
    assert 1.0 == asyncio.run(forgotten)
    with pytest.raises(TypeError, match=r"^result\[1\]: found int among Triplets"):
        Rollout.from_result([triplet(), 1], rollout_id="r")
    with pytest.raises(ValueError, match="rollout_id: expected a text that is not empty"):
        Rollout.from_result(None, rollout_id="")
    with pytest.raises(ValueError, match="attempt: expected a number from 0"):
        Rollout.from_result(None, rollout_id="r", attempt=-1)


def test_triplets_given_are_not_changed() -> None:
    """The Triplets that were handed over stay as they were."""
    given = triplet()
    before = replace(given)
    Rollout.from_result([given], rollout_id="r")
    assert before == given


def test_json_of_protobuf_is_told_from_to_json(spans: tuple[ReadableSpan, ...]) -> None:
    """Protobuf's own JSON, with ids in base64, is no OTLP/JSON: its spans are stray, not misread."""
    made = adapt(MessageToJson(encode_spans(spans)))
    assert (0, {"bad_span_id"}) == (len(made), {row.reason for row in made.stray})


def test_the_package_hands_on_both_halves() -> None:
    """Emitting and adapting are names of the package itself."""
    from spanmill import instrument

    names = ("call", "configure", "counters", "flush", "reward", "rollout", "tracer_provider")
    assert [getattr(instrument, name) for name in names] == [getattr(spanmill, name) for name in names]
    assert sorted(spanmill.__all__) == sorted(name for name in spanmill.__all__ if hasattr(spanmill, name))
