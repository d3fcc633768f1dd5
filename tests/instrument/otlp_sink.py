"""An OTLP receiver of the test's own process, over gRPC and over HTTP, that decodes with opentelemetry-proto."""

import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"

Record = dict[str, Any]


def plain(value: AnyValue) -> Any:
    """An OTLP value as Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(v) for v in value.array_value.values]
    return None if kind is None else getattr(value, kind)


class Sink:
    """What a receiver got, request by request."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.answers = threading.Event()
        """Cleared, the receiver takes requests and never answers them."""
        self.answers.set()

    def take(self, body: bytes, headers: dict[str, str]) -> bytes:
        """Keep a request and give the answer to it."""
        self.bodies.append(body)
        self.headers.append(headers)
        self.answers.wait(30)
        return b""

    def spans(self) -> list[Record]:
        """Every span received: name, ids in hex, attributes, resource attributes, times, whether it failed."""
        return [
            {
                "name": span.name,
                "trace_id": span.trace_id.hex(),
                "span_id": span.span_id.hex(),
                "parent_id": span.parent_span_id.hex(),
                "attributes": {a.key: plain(a.value) for a in span.attributes},
                "resource": {a.key: plain(a.value) for a in group.resource.attributes},
                "start_ns": span.start_time_unix_nano,
                "end_ns": span.end_time_unix_nano,
                "failed": span.status.code == 2,
            }
            for body in list(self.bodies)
            for group in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[Record]:
        """The spans of this name."""
        return [span for span in self.spans() if span["name"] == name]

    def wait_for(self, count: int, timeout_s: float = 20) -> list[Record]:
        """The spans, as soon as there are `count` of them or the time is up."""
        until = time.monotonic() + timeout_s
        while len(spans := self.spans()) < count and time.monotonic() < until:
            time.sleep(0.01)
        return spans


@contextmanager
def grpc_receiver(address: str = "127.0.0.1:0") -> Generator[Sink]:
    """A gRPC receiver with gRPC's default limit of 4 MiB for a message."""
    sink = Sink()

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        return sink.take(body, {str(k): str(v) for k, v in context.invocation_metadata()})

    handler = cast("Any", grpc).unary_unary_rpc_method_handler(export)

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return handler if handler_call_details.method == METHOD else None

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((Handler(),))
    sink.endpoint = f"http://127.0.0.1:{server.add_insecure_port(address)}"
    server.start()
    yield sink
    sink.answers.set()
    server.stop(None).wait()


@contextmanager
def http_receiver() -> Generator[Sink]:
    """An HTTP receiver of OTLP protobuf."""
    sink = Sink()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = sink.take(body, {"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the test's output clean."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that is gone before its answer is what some tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    sink.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield sink
    sink.answers.set()
    server.shutdown()
    server.server_close()
