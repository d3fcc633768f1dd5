import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from spanmill.collector.inputs import Request, read_rewards, read_unit, units
from spanmill.collector.journal import JournalWriter, Kind, segment_path
from spanmill.errors import InputError
from spanmill.triplets.records import Reward

TRACE = bytes(range(16))
SPAN = bytes(range(8))


def traces(name: str) -> bytes:
    """A request of one span."""
    request = ExportTraceServiceRequest()
    span = request.resource_spans.add().scope_spans.add().spans.add(trace_id=TRACE, span_id=SPAN, name=name)
    span.start_time_unix_nano = 1
    return request.SerializeToString()


def logs(name: str) -> bytes:
    """A request of one log record."""
    request = ExportLogsServiceRequest()
    record = request.resource_logs.add().scope_logs.add().log_records.add(event_name=name, trace_id=TRACE)
    record.observed_time_unix_nano = 1
    return request.SerializeToString()


def text_log() -> bytes:
    """A request of one log record that has nothing but a text, whose bytes might be a span's name as well."""
    request = ExportLogsServiceRequest()
    request.resource_logs.add().scope_logs.add().log_records.add().body.string_value = "text"
    return request.SerializeToString()


def big_endian(*requests: bytes) -> bytes:
    """Requests as the Go collector's file exporter writes them."""
    return b"".join(len(request).to_bytes(4, "big") + request for request in requests)


def delimited(*requests: bytes) -> bytes:
    """Requests as protobuf's own delimited streams are written."""
    return b"".join(bytes([len(request) & 0x7F | 0x80, len(request) >> 7]) + request for request in requests)


def lines(*requests: object) -> bytes:
    """Requests as JSON lines."""
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


T1, T2, L1 = traces("one"), traces("two" * 50), logs("one")
JSON_TRACES = {"resourceSpans": [{"scopeSpans": [{"spans": [{"name": "one"}]}]}]}
JSON_LOGS = {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"eventName": "one"}]}]}]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes, str], Path]:
    """Writes a file and gives its path."""

    def write(content: bytes, name: str = "input") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return write


def read_requests(path: Path) -> Iterator[Request]:
    """The requests that an input holds."""
    return (request for unit in units(path) for request in read_unit(unit))


def read(path: Path) -> list[tuple[Kind, bytes]]:
    """Kind and body of the requests that an input holds."""
    return [(request.kind, request.body) for request in read_requests(path)]


Write = Callable[..., Path]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (big_endian(T1, T2), [(Kind.TRACES_PROTO, T1), (Kind.TRACES_PROTO, T2)]),
        (big_endian(L1, L1), [(Kind.LOGS_PROTO, L1), (Kind.LOGS_PROTO, L1)]),
        (big_endian(T1, b"", L1), [(Kind.TRACES_PROTO, T1), (Kind.LOGS_PROTO, L1)]),
        (delimited(T2, L1, T1), [(Kind.TRACES_PROTO, T2), (Kind.LOGS_PROTO, L1), (Kind.TRACES_PROTO, T1)]),
        (bytes([len(T1)]) + T1, [(Kind.TRACES_PROTO, T1)]),
        (T1, [(Kind.TRACES_PROTO, T1)]),
        (L1, [(Kind.LOGS_PROTO, L1)]),
        (
            lines(JSON_TRACES, JSON_LOGS),
            [(Kind.TRACES_JSON, lines(JSON_TRACES)), (Kind.LOGS_JSON, lines(JSON_LOGS))],
        ),
        (b"\n \n" + lines({"x": 1, **JSON_LOGS}), [(Kind.LOGS_JSON, lines({"x": 1, **JSON_LOGS}))]),
        (b"\xef\xbb\xbf" + lines(JSON_TRACES), [(Kind.TRACES_JSON, b"\xef\xbb\xbf" + lines(JSON_TRACES))]),
        (lines(JSON_TRACES)[:-1], [(Kind.TRACES_JSON, lines(JSON_TRACES)[:-1])]),
        (json.dumps(JSON_TRACES, indent=2).encode(), [(Kind.TRACES_JSON, json.dumps(JSON_TRACES, indent=2).encode())]),
        (b"", []),
    ],
    ids=[
        "be",
        "be-logs",
        "be-both",
        "varint",
        "short-varint",
        "one",
        "one-log",
        "json",
        "keys",
        "bom",
        "end",
        "pretty",
        "empty",
    ],
)
def test_content_says_what_a_file_holds(
    write: Write, pack: Callable[[bytes], bytes], content: bytes, expected: list[tuple[Kind, bytes]]
) -> None:
    """Framing, encoding, signal and compression of a file are recognised without its name."""
    assert expected == read(write(pack(content)))


@pytest.mark.parametrize("body", [T1, lines(JSON_TRACES)], ids=["proto", "json"])
def test_requests_that_are_compressed_one_by_one(write: Write, body: bytes) -> None:
    """The file exporter compresses each request by itself and puts its length before it, JSON too."""
    path = write(big_endian(*[zstandard.compress(body)] * 2))

    kind = Kind.TRACES_PROTO if body is T1 else Kind.TRACES_JSON
    assert [(kind, body)] * 2 == read(path)


def test_compressed_files_may_be_put_together(write: Write) -> None:
    """Several gzip members or zstd frames in a row are one file."""
    half = big_endian(T1)

    expected = [(Kind.TRACES_PROTO, T1)] * 2
    assert expected == read(write(gzip.compress(half) + gzip.compress(half), "a"))
    assert expected == read(write(zstandard.compress(half) + zstandard.compress(half), "b"))


@pytest.mark.parametrize(
    ("name", "content", "kinds"),
    [
        ("a/otel.binpb", big_endian(T1, text_log()), [Kind.TRACES_PROTO, Kind.TRACES_PROTO]),
        ("a/traces.binpb", big_endian(L1, text_log()), [Kind.LOGS_PROTO, Kind.LOGS_PROTO]),
        ("a/traces.binpb", big_endian(text_log()), [Kind.TRACES_PROTO]),
        ("a/logs.binpb", big_endian(text_log()), [Kind.LOGS_PROTO]),
        ("a/otel.binpb", big_endian(text_log()), [Kind.LOGS_PROTO]),
    ],
)
def test_the_name_breaks_ties_only(write: Write, name: str, content: bytes, kinds: list[Kind]) -> None:
    """A request that might be either has the kind of the requests before it, else the one that the name suggests."""
    assert kinds == [kind for kind, _ in read(write(content, name))]


def test_a_folder_is_read_in_order_of_names(write: Write) -> None:
    """Files of a folder and its folders come sorted; hidden ones are left alone."""
    write(T1, "in/b/traces.pb")
    write(lines(JSON_LOGS), "in/a.jsonl")
    write(b"", "in/c.jsonl")
    folder = write(T1, "in/.hidden").parent
    assert ["a.jsonl", "traces.pb", "c.jsonl"] == [unit.path.name for unit in units(folder)]
    assert [Kind.LOGS_JSON, Kind.TRACES_PROTO] == [kind for kind, _ in read(folder)]


def test_a_folder_of_journals_is_read_by_the_journal(tmp_path: Path) -> None:
    """Folders with segments are journals, whose records of every kind come in order."""
    for shard in ("one", "two"):
        with JournalWriter(tmp_path / "in" / shard) as writer:
            for kind, body in ((Kind.TRACES_PROTO, T1), (Kind.REWARDS, shard.encode()), (Kind.FLUSH, b"")):
                writer.append(kind, body, 1)

    assert [
        (Kind.TRACES_PROTO, T1),
        (Kind.REWARDS, b"one"),
        (Kind.FLUSH, b""),
        (Kind.TRACES_PROTO, T1),
        (Kind.REWARDS, b"two"),
        (Kind.FLUSH, b""),
    ] == read(tmp_path / "in")


def test_a_journal_of_several_workers_is_one(tmp_path: Path) -> None:
    """It has the requests of all workers, each worker's in their order, with the time at which they were received."""
    with JournalWriter(tmp_path) as one, JournalWriter(tmp_path, worker=1) as other:
        one.append(Kind.TRACES_PROTO, b"b", 20)
        one.append(Kind.TRACES_PROTO, b"d", 40)
        other.append(Kind.TRACES_PROTO, b"a", 10)
        other.append(Kind.TRACES_PROTO, b"c", 30)

    assert [(Kind.TRACES_PROTO, body, at) for body, at in ((b"b", 20), (b"d", 40), (b"a", 10), (b"c", 30))] == list(
        read_requests(tmp_path)
    )


def test_what_is_damaged_in_a_journal_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A torn tail that has a successor is passed over, with its segment's name; what stands around it is read."""
    for body in (T1, T2):
        with JournalWriter(tmp_path) as journal:
            journal.append(Kind.TRACES_PROTO, body, 1)
    first = segment_path(tmp_path, 1)
    with first.open("ab") as file:
        file.write(b"torn")
    assert [(Kind.TRACES_PROTO, T1), (Kind.TRACES_PROTO, T2)] == read(tmp_path)
    assert [f"{first}: 4 bytes in 1 places are damaged and left out"] == caplog.messages


def test_a_torn_tail_that_nobody_writes_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the end of the newest segment a record may be on its way while a writer is at work; else it is lost."""
    first = segment_path(tmp_path, 1)
    with JournalWriter(tmp_path) as journal:
        journal.append(Kind.TRACES_PROTO, T1, 1)
        with first.open("ab") as file:
            file.write(b"torn")
        assert [(Kind.TRACES_PROTO, T1)] == read(tmp_path)
        assert [] == caplog.messages
    assert [(Kind.TRACES_PROTO, T1)] == read(tmp_path)
    assert [f"{first}: 4 bytes in 1 places are damaged and left out"] == caplog.messages


@pytest.mark.parametrize(
    "content",
    [
        big_endian(T1, T2)[:-1],
        big_endian(T1) + b"\0\0",
        delimited(T1, T2)[:-1],
        delimited(T1) + b"\x80",
        zstandard.compress(big_endian(T1, T2)[:-1]),
    ],
)
def test_a_last_request_that_was_cut_is_left_out(
    write: Write, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A writer that was killed leaves half a request: what stands before is read, and the loss is said."""
    path = write(content)

    assert [(Kind.TRACES_PROTO, T1)] == read(path)
    assert [f"{path} ends within a request, which is left out; the 1 before it are whole"] == caplog.messages


def test_a_last_line_that_was_cut_is_left_out(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """Half a JSON line at the end is left out and said."""
    path = write(lines(JSON_TRACES, JSON_TRACES)[:-9])

    assert [(Kind.TRACES_JSON, lines(JSON_TRACES))] == read(path)
    assert [f"{path} ends within a line, which is left out"] == caplog.messages


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_compressed_data_that_was_cut_is_read_as_far_as_it_goes(
    write: Write, pack: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Requests before the cut of a compressed file are not lost, and the cut is said."""
    path = write(pack(big_endian(T1)) + pack(big_endian(T2))[:-20])

    assert [(Kind.TRACES_PROTO, T1)] == read(path)
    assert f"{path} ends within its compressed data; what stands before that is read" in caplog.messages


def test_a_request_that_does_not_parse_is_handed_on(write: Write) -> None:
    """A broken request or line between good ones has the kind of its file, so that its reader counts it."""
    broken = b"\xff" + T1

    assert [(Kind.TRACES_PROTO, body) for body in (T1, broken, T1)] == read(write(big_endian(T1, broken, T1), "a"))
    assert [(Kind.TRACES_JSON, body) for body in (lines(JSON_TRACES), b'{"res\n', lines(JSON_TRACES))] == read(
        write(lines(JSON_TRACES) + b'{"res\n' + lines(JSON_TRACES), "b")
    )


def test_lost_framing_is_an_error(write: Write) -> None:
    """If a request does not parse and no length stands behind it, what is left of the file cannot be found."""
    path = write(big_endian(T1, b"\xff" * 9) + b"\xff" * 99)
    requests = read_requests(path)

    assert [T1, b"\xff" * 9] == [next(requests).body, next(requests).body]
    with pytest.raises(InputError, match="input is damaged: request 2 does not parse"):
        next(requests)


def metrics() -> bytes:
    """A request of one gauge."""
    request = ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="load", unit="1")
    metric.gauge.data_points.add(as_double=1)
    return request.SerializeToString()


@pytest.mark.parametrize(
    "content",
    [
        b"hello, this is no OTLP",
        b"\x0a\x0a",
        bytes(range(256)) * 8,
        big_endian(metrics()),
        metrics(),
        big_endian(T1)[:-1],
        big_endian(lines({"resourceMetrics": []})),
        lines({"resourceMetrics": []}),
        b'{"resourceSp',
        b"[\n " + lines(JSON_TRACES) + b"]",
        gzip.compress(b"text"),
        gzip.compress(T1)[:5] + b"garbage" * 9,
        zstandard.compress(T1)[:6] + b"garbage" * 9,
    ],
    ids=lambda content: f"{len(content)} bytes",  # a gzip header holds the time: the content is no stable name
)
def test_what_is_no_otlp_from_its_start_is_an_error(write: Write, content: bytes) -> None:
    """A file that does not begin with a request of traces or logs is refused by name."""
    path = write(content)

    with pytest.raises(InputError, match=str(path)):
        read(path)


def test_files_that_should_be_readable_are_not_passed_over(write: Write, tmp_path: Path) -> None:
    """In a folder, a file named as data that is damaged at its start is an error; so are no data, and no file."""
    folder = write(b"garbage", "pb/a.binpb.gz").parent
    with pytest.raises(InputError, match=r"a\.binpb\.gz"):
        read(folder)
    folder = write(b'{"resourceSp\n', "lines/a.jsonl").parent
    with pytest.raises(InputError, match=r"a\.jsonl is damaged"):
        read(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no journal and no file of OTLP requests"):
        read(tmp_path / "empty")
    with pytest.raises(InputError, match="missing cannot be read: No such file or directory"):
        read(tmp_path / "missing")


REWARDS = [
    Reward("r1", 0.25, source="table"),
    Reward("r1", 1.0, attempt=1, call_id="chatcmpl-1", name="lint", source="table"),
    Reward("r2", -3.0, attempt=0, source="table"),
]


def test_rewards_of_jsonl(write: Write) -> None:
    """JSON lines: int, float and boolean values; absent and null columns are not there."""
    rows = [
        {"rollout_id": "r1", "value": 0.25, "attempt": None, "other": [1]},
        {"rollout_id": "r1", "value": True, "attempt": 1, "call_id": "chatcmpl-1", "name": "lint"},
        {"rollout_id": "r2", "value": -3, "attempt": 0, "name": ""},
    ]

    assert REWARDS == list(read_rewards(write(lines(*rows))))


def test_rewards_of_csv(write: Write) -> None:
    """CSV: columns in any order, empty cells are not there."""
    content = (
        "\ufeffvalue,attempt,rollout_id,name,call_id,other\r\n0.25,,r1,,,x\ntrue,1,r1,lint,chatcmpl-1,\n-3,0,r2,,,\n"
    )

    assert REWARDS == list(read_rewards(write(content.encode())))


@pytest.mark.parametrize("attempts", [pa.array([None, 1, 0], pa.int8()), pa.array([math.nan, 1.0, 0.0])])
def test_rewards_of_parquet(tmp_path: Path, attempts: "pa.Array[pa.Scalar[pa.DataType]]") -> None:
    """Parquet: attempts may be floats with NaN for none, as other tools write columns with gaps."""
    table = pa.table(
        {
            "rollout_id": ["r1", "r1", "r2"],
            "value": [0.25, 1.0, -3.0],
            "attempt": attempts,
            "call_id": [None, "chatcmpl-1", None],
            "name": pa.array(["", "lint", None]).dictionary_encode(),
            "other": [1, 2, 3],
        }
    )
    pq.write_table(table, tmp_path / "rewards")

    assert REWARDS == list(read_rewards(tmp_path / "rewards"))


@pytest.mark.parametrize("word", ["NaN", "nan", "Infinity", "-inf"])
def test_values_that_are_not_finite_are_handed_on(write: Write, word: str) -> None:
    """NaN and infinity are quarantined later, with their reason; here they are read."""
    expected = repr([float(word)] * 2)
    content = f"rollout_id,value\nr1,{word}\nr1,{word}\n".encode()
    rows = lines(*[{"rollout_id": "r1", "value": word}] * 2)

    assert expected == repr([reward.value for reward in read_rewards(write(content, "a.csv"))])
    assert expected == repr([reward.value for reward in read_rewards(write(rows, "a.jsonl"))])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rollout_id,value\nr1,1\n,2\n", "line 3: rollout_id is empty"),
        (b"rollout_id,value\nr1,\n", "line 2: value is missing; expected a number"),
        (b"rollout_id,value\nr1,good\n", "line 2: could not convert string to float: 'good'"),
        (b"rollout_id,value\nr1,1,2\n", "line 2: more cells than the header has; a comma in a cell needs quotes"),
        (b"rollout_id,attempt,value\nr1,-1,2\n", "line 2: attempt is '-1'; expected a whole number from 0"),
        (b"rollout,value\nr1,1\n", "has no column rollout_id; its columns are rollout, value"),
        (b"", "has no column rollout_id; its columns are none"),
        (b'{"rollout_id": "r1", "value": 1}\n{"rollout_id": "r1"}', "line 2: value is missing; expected a number"),
        (b'{"rollout_id": 5, "value": 1}', "line 1: rollout_id is 5, not text"),
        (b'{"rollout_id": "r", "value": [1]}', "line 1: value is [1]; expected a number"),
        (b'{"rollout_id": "r", "value": 1' + b"0" * 400 + b"}", "line 1: int too large to convert to float"),
        (b'{"rollout_id": "r", "value": 1, "attempt": 1.5}', "line 1: attempt is 1.5; expected a whole number from 0"),
        (
            b'{"rollout_id": "r", "value": 1, "attempt": true}',
            "line 1: attempt is True; expected a whole number from 0",
        ),
        (b'{"rollout_id": "r", "value": 1}\n[1]\n', "line 2: [1] is no JSON object"),
        (b'{"rollout_id": "r", "value": 1}\n{"a\n', "line 2: no JSON: "),
        (b"rollout_id,value\n\xff,1\n", "cannot be read: 'utf-8' codec can't decode byte 0xff in position 17"),
        (b"PAR1 and no more", "cannot be read: "),
    ],
)
def test_rows_that_are_no_reward_are_errors(write: Write, content: bytes, message: str) -> None:
    """A row without rollout or value, or with something else in their place, is named."""
    path = write(content)

    with pytest.raises(InputError) as caught:
        list(read_rewards(path))
    assert str(caught.value).startswith(f"{path}") and message in str(caught.value)


def test_a_missing_table_is_an_error(tmp_path: Path) -> None:
    """A table that is not there is said in one line."""
    with pytest.raises(InputError, match="none cannot be read: No such file or directory"):
        list(read_rewards(tmp_path / "none"))
