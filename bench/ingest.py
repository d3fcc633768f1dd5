"""Measures receiving and building: LLM spans over gRPC into `spanmill serve`, then `spanmill build` of its journal.

    bench/ingest.py [--spans 4000] [--per-request 16] [--in-flight 8] [--packed]

A span carries 2,048 prompt ids on average, 256 response ids and 256 logprobs: as OTLP arrays (17 KB), or with --packed
as bytes of int32 and float32. Eight spans make a rollout in which each prompt extends the one before. The same requests
first go to a peer, a bare grpcio server that parses them with opentelemetry-proto and throws them away: figures stand
beside their ratio to that, since the machine differs from run to run.

CPU is user and system time. The receiver is the process that acknowledges, the indexer the one that writes rows; all-in
is both, from the first request to the last row on disk. Linux only: figures of other processes come from /proc.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

import spanmill

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
COMMAND = str(Path(sys.executable).with_name("spanmill"))
TURNS, FIRST_PROMPT, ANSWER = 8, 1152, 256
"""Prompts of 1152, 1408, ... 2944 ids: 2,048 on average."""

VOCABULARY = 150_000
"""Drawn evenly, so that an id takes as many bytes as most ids of a large vocabulary do."""

ROLLOUTS = 32
"""Rollouts with tokens of their own; a longer load repeats them under new ids."""

TRACE, SPAN, NAME = b"T" * 16, b"S" * 8, "R" * 16
"""What stands for the ids in a template, at the length that the ids have."""


class Load(NamedTuple):
    """What is sent."""

    spans: int
    per_request: int
    in_flight: int
    packed: bool


class Sent(NamedTuple):
    """What the sender saw: wall seconds from the first request to the last acknowledgement."""

    seconds: float
    spans: int
    bytes: int


class Usage(NamedTuple):
    """CPU seconds and peak resident MiB of one process."""

    cpu: float
    peak_mib: float


class Served(NamedTuple):
    """What `spanmill serve` took."""

    sent: Sent
    seconds: float
    """From the first request to the last row on disk, wall time."""
    receiver: Usage
    """While requests came."""
    indexer: Usage
    all_in: float
    """CPU seconds of both."""


# ---------------------------------------------------------------- the load


def templates(packed: bool) -> list[bytes]:
    """Serialised ResourceSpans of one span each, rollout after rollout, with placeholders for the ids."""
    rng = random.Random(17)
    vocabulary = range(VOCABULARY)
    out: list[bytes] = []
    for _ in range(ROLLOUTS):
        prompt = rng.choices(vocabulary, k=FIRST_PROMPT)
        for turn in range(TURNS):
            answer = rng.choices(vocabulary, k=ANSWER)
            logprobs = [-rng.expovariate(2.0) for _ in answer]
            out.append(template(turn, prompt, answer, logprobs, packed))
            prompt = prompt + answer
    return out


def template(turn: int, prompt: list[int], answer: list[int], logprobs: list[float], packed: bool) -> bytes:
    """One call's span within its resource, as a request of its own: concatenated requests are one request."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    add(resource.resource, "service.name", "agent")
    span = resource.scope_spans.add().spans.add(
        trace_id=TRACE, span_id=SPAN, name="chat policy", kind=Span.SPAN_KIND_SERVER
    )
    span.start_time_unix_nano = 1_780_000_000_000_000_000 + turn * 1_000_000_000
    span.end_time_unix_nano = span.start_time_unix_nano + 900_000_000
    text = {
        "spanmill.rollout.id": NAME,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "policy-7b",
        "gen_ai.response.model": "policy-7b",
        "gen_ai.response.id": f"chatcmpl-{NAME}-{turn}",
        "spanmill.capture": "engine",
        "spanmill.logprobs.mode": "raw",
    }
    for key, value in text.items():
        add(span, key, value)
    add(span, "gen_ai.response.finish_reasons", "stop", array=True)
    add(span, "spanmill.prompt.token_count", len(prompt))
    add(span, "spanmill.response.token_count", len(answer))
    numbers = {
        "prompt.token_ids": ("i", prompt),
        "response.token_ids": ("i", answer),
        "response.logprobs": ("f", logprobs),
    }
    for key, (kind, values) in numbers.items():
        if packed:
            add(span, f"spanmill.{key}", struct.pack(f"<{len(values)}{kind}", *values))
        else:
            add(span, f"spanmill.{key}", *values, array=True)
    return request.SerializeToString()


def add(owner: Span | Resource, key: str, *values: str | bytes | int | float, array: bool = False) -> None:
    """Set an attribute of a span or resource: one value, or an array of them."""
    fields = {str: "string_value", bytes: "bytes_value", int: "int_value", float: "double_value"}
    value = owner.attributes.add(key=key).value
    for element in values:
        target = value.array_value.values.add() if array else value
        setattr(target, fields[type(element)], element)


def requests(load: Load) -> Iterator[bytes]:
    """The load's requests, each span with ids of its own."""
    made = templates(load.packed)
    spans = (
        made[i % len(made)]
        .replace(TRACE, (i // TURNS + 1).to_bytes(16, "big"))
        .replace(SPAN, (i + 1).to_bytes(8, "big"))
        .replace(NAME.encode(), f"rollout-{i // TURNS:08d}".encode())
        for i in range(load.spans)
    )
    while batch := b"".join(span for _, span in zip(range(load.per_request), spans, strict=False)):
        yield batch


def send(address: str, load: Load, result: Connection) -> None:
    """Send the load with a bounded number of requests in flight; every one must be acknowledged."""
    prepared = list(requests(load))
    free = threading.Semaphore(load.in_flight)
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(timeout=30)
        export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(EXPORT)
        start = time.perf_counter()
        calls: list[grpc.Future[bytes]] = []
        for body in prepared:
            free.acquire()
            call = export.future(body, timeout=60)
            call.add_done_callback(lambda _: free.release())
            calls.append(call)
        for call in calls:
            call.result()  # raises what the server answered
        seconds = time.perf_counter() - start
    result.send(Sent(seconds, load.spans, sum(map(len, prepared))))


def send_from_another_process(address: str, load: Load) -> Sent:
    """Run `send` in a process of its own, so that its CPU is not the receiver's."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=send, args=(address, load, there))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"the sender failed with exit code {process.exitcode}")
    return here.recv()


# ---------------------------------------------------------------- the peer


def peer(ready: Connection) -> None:
    """A grpcio server that parses every request with opentelemetry-proto and throws it away."""

    def export(request: ExportTraceServiceRequest, _: grpc.ServicerContext) -> bytes:
        return b""

    handler: grpc.RpcMethodHandler[ExportTraceServiceRequest, bytes] = grpc.unary_unary_rpc_method_handler(
        export, request_deserializer=ExportTraceServiceRequest.FromString
    )
    service, _, method = EXPORT[1:].partition("/")
    options = [("grpc.max_receive_message_length", 64 << 20)]
    server = grpc.server(futures.ThreadPoolExecutor(8), options=options)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.send(f"127.0.0.1:{port}")
    server.wait_for_termination()


def measure_peer(load: Load) -> tuple[Sent, Usage]:
    """What the peer takes for the load."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=peer, args=(there,))
    process.start()
    address = here.recv()
    assert process.pid is not None
    before = usage(process.pid)
    sent = send_from_another_process(address, load)
    after = usage(process.pid)
    process.terminate()
    process.join()
    return sent, Usage(after.cpu - before.cpu, after.peak_mib)


# ---------------------------------------------------------------- ours


def usage(pid: int) -> Usage:
    """CPU and peak memory of a running process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return Usage((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak[1]) / 1024 if peak else 0.0)


def measure_serve(load: Load, folder: Path) -> Served:
    """What `spanmill serve` takes for the load, until the last row is on disk; its start is taken off."""
    waits = ["--flush-on-exit", "--drain-timeout", "10m"]
    ports = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command = [COMMAND, "serve", "--out", f"{folder}/live", "--journal", f"{folder}/journal", *waits, *ports]
    serve = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    address = re.search(r"grpc=(\S+)", serve.stdout.readline() if serve.stdout else "")
    if not address:
        raise SystemExit("spanmill serve did not get ready")
    (indexer,) = map(int, Path(f"/proc/{serve.pid}/task/{serve.pid}/children").read_text().split())
    idle = {pid: usage(pid) for pid in (serve.pid, indexer)}
    start = time.perf_counter()
    sent = send_from_another_process(address[1], load)
    receiver = usage(serve.pid)
    serve.send_signal(signal.SIGTERM)
    last = idle
    while serve.poll() is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            now = {pid: usage(pid) for pid in idle}
            last = {pid: Usage(now[pid].cpu, max(now[pid].peak_mib, last[pid].peak_mib)) for pid in idle}
        time.sleep(0.02)
    if serve.returncode:
        raise SystemExit(f"spanmill serve ended with {serve.returncode}")
    return Served(
        sent,
        time.perf_counter() - start,
        receiver=Usage(receiver.cpu - idle[serve.pid].cpu, receiver.peak_mib),
        indexer=Usage(last[indexer].cpu - idle[indexer].cpu, last[indexer].peak_mib),
        all_in=sum(last[pid].cpu - idle[pid].cpu for pid in idle),
    )


def measure_build(source: Path, out: Path, *options: str) -> tuple[float, Usage]:
    """Wall seconds and usage of `spanmill build`, its start included."""
    start = time.perf_counter()
    build = subprocess.Popen([COMMAND, "build", source, "--out", out, *options], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(build.pid, 0)
    if status:
        raise SystemExit(f"spanmill build ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - start, Usage(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


# ---------------------------------------------------------------- the report


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spans", type=int, default=4000)
    parser.add_argument("--per-request", type=int, default=16)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--packed", action="store_true", help="numbers as bytes instead of OTLP arrays")
    load = Load(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="spanmill-bench-") as name:
        folder = Path(name)
        peer_sent, peer_used = measure_peer(load)
        served = measure_serve(load, folder)
        first = next(requests(load))
        (folder / "first.binpb").write_bytes(struct.pack(">I", len(first)) + first)
        start_s, started = measure_build(folder / "first.binpb", folder / "started")
        build_s, built = measure_build(folder / "journal", folder / "built")
        for dataset in ("live", "built"):
            rows = spanmill.read_triplets(folder / dataset).filter("trainable").collect().height
            if rows != load.spans:
                raise SystemExit(f"{load.spans} spans were sent, {rows} trainable rows came of them in {dataset}")
    sent, gb, built_spans = served.sent, served.sent.bytes / 1e9, load.spans - load.per_request
    build_cpu = built.cpu - started.cpu
    print(
        f"{load.spans} spans of {sent.bytes / load.spans / 1000:.1f} KB, {'packed' if load.packed else 'arrays'}, ",
        end="",
    )
    print(f"{load.per_request} a request, {load.in_flight} requests in flight")
    line("acknowledged spans/s", load.spans / sent.seconds, load.spans / peer_sent.seconds)
    line("acknowledged MB/s", sent.bytes / 1e6 / sent.seconds, peer_sent.bytes / 1e6 / peer_sent.seconds)
    line("receiver CPU s/GB", served.receiver.cpu / gb, peer_used.cpu / gb)
    line("receiver peak MiB", served.receiver.peak_mib, peer_used.peak_mib)
    line("indexer CPU s/GB", served.indexer.cpu / gb)
    line("indexer peak MiB", served.indexer.peak_mib)
    line("sent to written, spans/s", load.spans / served.seconds)
    line("all-in spans per CPU-second", load.spans / served.all_in, load.spans / peer_used.cpu)
    line("build spans/s", built_spans / (build_s - start_s))
    line("build spans per CPU-second", built_spans / build_cpu, load.spans / peer_used.cpu)
    line("build CPU s/GB", build_cpu / gb)
    line("build peak MiB", built.peak_mib)


def line(label: str, ours: float, peer: float | None = None) -> None:
    """A figure of ours beside the peer's."""
    ratio = "" if peer is None else f"   peer {peer:>10,.1f}   ratio {ours / peer:6.2f}"
    print(f"  {label:<28}{ours:>12,.1f}{ratio}")


if __name__ == "__main__":
    main()
