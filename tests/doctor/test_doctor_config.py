"""What the doctor says of configurations of the Go collector."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from spanmill.doctor.collector_config import diagnose, examine
from spanmill.doctor.finding import Finding

SHIPPED = Path(__file__).parents[2] / "otel-config.yaml"
OURS = "otlp_grpc/spanmill"


def shipped() -> dict[str, Any]:
    """The configuration that we ship."""
    return yaml.safe_load(SHIPPED.read_text())


def test_the_shipped_configuration() -> None:
    """What we ship loses nothing."""
    assert [Finding("ok", "nothing in it loses spans on their way to spanmill")] == examine(SHIPPED)


def change(config: dict[str, Any], path: str, value: object) -> None:
    """Set the value at a path `a.b.c`; ... takes it out."""
    *folders, name = path.split(".")
    for folder in folders:
        config = config.setdefault(folder, {})
    if value is ...:
        del config[name]
    else:
        config[name] = value


CASES: list[tuple[str, object, str, str]] = [
    ("receivers.otlp.protocols.grpc.max_recv_msg_size_mib", ..., "error", "max_recv_msg_size_mib is 4"),
    ("receivers.otlp.protocols.grpc.max_recv_msg_size_mib", 16, "error", "max_recv_msg_size_mib is 16"),
    ("receivers.otlp.protocols.http.max_request_body_size", ..., "error", "max_request_body_size is 20 MiB"),
    ("receivers.otlp.protocols.grpc", None, "error", "max_recv_msg_size_mib is 4"),
    (f"exporters.{OURS}.compression", "zstd", "error", "compression: zstd"),
    (f"exporters.{OURS}.compression", "snappy", "error", "compression: snappy"),
    (f"exporters.{OURS}.timeout", "2s", "warning", "timeout is 2 s"),
    (f"exporters.{OURS}.tls", ..., "warning", "uses TLS"),
    (f"exporters.{OURS}.retry_on_failure.max_elapsed_time", ..., "warning", "away for longer than 300 s"),
    (f"exporters.{OURS}.retry_on_failure.max_elapsed_time", "1m30s", "warning", "away for longer than 90 s"),
    (f"exporters.{OURS}.retry_on_failure.enabled", False, "error", "without retry_on_failure"),
    (f"exporters.{OURS}.sending_queue.block_on_overflow", ..., "warning", "its sending_queue is full"),
    (f"exporters.{OURS}.sending_queue.batch.max_size", 1_000_000, "error", "max_size is 1e+06 bytes"),
    ("processors.memory_limiter.limit_mib", 64, "warning", "limit_mib is 64"),
    ("service.pipelines.logs", ..., "warning", "no pipeline of logs"),
    ("service.pipelines.traces", ..., "error", "no pipeline of traces"),
    ("service.pipelines.traces.exporters", ["debug"], "error", "ends in an OTLP exporter"),
]


@pytest.mark.parametrize(("path", "value", "level", "says"), CASES)
def test_a_setting(path: str, value: object, level: str, says: str) -> None:
    """One setting that loses data makes one finding, which says what is set and what to do."""
    config = shipped()
    change(config, path, value)
    (found,) = diagnose(config)
    assert (level, True, True) == (found.level, says in found.text, found.do != "")


PROCESSORS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("tail_sampling", {"policies": []}, ["error"]),
    ("probabilistic_sampler/x", {"sampling_percentage": 10}, ["error"]),
    ("batch", {}, ["warning"]),
    ("groupbytrace", {"wait_duration": "10s"}, ["error"]),
    ("filter/spans", {"traces": {"span": ['name == "GET"']}}, ["warning"]),
    ("filter/metrics", {"metrics": {"metric": ["true"]}}, []),
    ("attributes/a", {"actions": [{"key": "gen_ai.output.messages", "action": "delete"}]}, ["error"]),
    ("attributes/b", {"actions": [{"pattern": "^spanmill.*", "action": "delete"}]}, ["error"]),
    ("attributes/c", {"actions": [{"key": "http.url", "action": "delete"}]}, []),
    ("attributes/d", {"actions": [{"key": "env", "value": "prod", "action": "insert"}]}, []),
    (
        "transform/a",
        {"trace_statements": [{"context": "span", "statements": ["truncate_all(attributes, 4096)"]}]},
        ["error"],
    ),
    ("transform/b", {"trace_statements": ["limit(span.attributes, 100, [])"]}, ["error"]),
    ("transform/c", {"trace_statements": ['set(span.attributes["env"], "prod")']}, []),
    ("redaction", {"allowed_keys": ["a"]}, ["error"]),
    ("redaction/b", {"allow_all_keys": True, "blocked_values": ["4[0-9]{12}"]}, ["warning"]),
    ("resource", {"attributes": []}, []),
]


@pytest.mark.parametrize(("name", "config", "levels"), PROCESSORS)
def test_a_processor(name: str, config: dict[str, Any], levels: list[str]) -> None:
    """A processor that samples, cuts, drops or groups is found; others are not."""
    whole = shipped()
    whole["processors"][name] = config
    whole["service"]["pipelines"]["traces"]["processors"].append(name)
    assert levels == [finding.level for finding in diagnose(whole) if finding.level != "ok"]


def test_the_backends_own_leg() -> None:
    """What stands behind a connector on the backend's leg alone, or in no pipeline at all, is nobody's loss."""
    config = shipped()
    config["processors"] |= {"tail_sampling": {}, "batch": {}}
    config["connectors"] = {"forward/backend": None}
    config["exporters"]["otlp_grpc/backend"]["compression"] = "zstd"
    config["service"]["pipelines"]["traces"]["exporters"] = ["forward/backend", OURS]
    config["service"]["pipelines"]["traces/backend"] = {
        "receivers": ["forward/backend"],
        "processors": ["tail_sampling"],
        "exporters": ["otlp_grpc/backend"],
    }
    assert ["ok"] == [finding.level for finding in diagnose(config)]


def test_a_way_through_a_connector() -> None:
    """A sampler before a connector that leads to spanmill counts."""
    config = shipped()
    config["processors"]["tail_sampling"] = {}
    config["connectors"] = {"forward": {}}
    pipelines = config["service"]["pipelines"]
    pipelines["traces/out"] = {"receivers": ["forward"], "exporters": [OURS]}
    pipelines["traces"]["exporters"] = ["forward"]
    pipelines["traces"]["processors"].append("tail_sampling")
    assert ["error"] == [finding.level for finding in diagnose(config)]


def test_older_names_and_other_exporters() -> None:
    """Names of older collectors mean the same; load balancing and Kafka have rules of their own."""
    config = shipped()
    exporters: dict[str, Any] = {
        "otlphttp": {"endpoint": "http://spanmill:4318", "compression": "snappy", "sending_queue": {"enabled": False}},
        "kafka": {"producer": {}, "protocol_version": "spanmill"},
        "loadbalancing/spanmill": {
            "routing_key": "traceID",
            "protocol": {
                "otlp": {
                    "compression": "zstd",
                    "retry_on_failure": {"max_elapsed_time": 0},
                    "sending_queue": {"block_on_overflow": True},
                }
            },
        },
    }
    config["exporters"] = exporters
    for pipeline in config["service"]["pipelines"].values():
        pipeline["exporters"] = list(exporters)
    texts = [(finding.level, finding.text) for finding in diagnose(config)]
    expected = [
        ("error", "exporter otlphttp: spanmill does not read compression: snappy"),
        ("warning", "exporter otlphttp drops spans when spanmill is away"),
        ("warning", "exporter loadbalancing/spanmill does not route on spanmill.rollout.id"),
        ("error", "exporter loadbalancing/spanmill: no Python gRPC server reads compression: zstd"),
    ]
    assert expected == [(level, text[: len(e)]) for (level, text), (_, e) in zip(texts, expected, strict=True)]
    config["service"]["pipelines"]["traces"]["exporters"] = ["kafka"]
    config["exporters"] = {"kafka": {}}
    assert ("error", True) == ((first := diagnose(config)[0]).level, "max_message_bytes" in first.text)


def test_values_that_cannot_be_told() -> None:
    """A setting from the environment is not guessed at."""
    config = shipped()
    change(config, "receivers.otlp.protocols.grpc.max_recv_msg_size_mib", "${env:MIB}")
    change(config, f"exporters.{OURS}.timeout", "${env:TIMEOUT}")
    change(config, "processors.memory_limiter.limit_mib", "${env:LIMIT}")
    assert ["ok"] == [finding.level for finding in diagnose(config)]


@pytest.mark.parametrize("content", [None, [], "text", 1, {"service": []}, {"service": {"pipelines": {"traces": 1}}}])
def test_what_is_no_configuration(content: object) -> None:
    """Anything else than a configuration is an error, never a crash."""
    assert ["error"] == [finding.level for finding in diagnose(content)]


@pytest.mark.parametrize("text", [b"a: [", b"\xff\xfe", b"a: b: c", None])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: bytes | None) -> None:
    """A file that is missing or no YAML is an error in one line."""
    path = tmp_path / "c.yaml"
    if text is not None:
        path.write_bytes(text)
    (found,) = examine(path)
    assert ("error", False) == (found.level, "\n" in str(found))


def test_odd_shapes_everywhere() -> None:
    """Whatever stands in the place of a component, it is looked at without a crash."""
    shapes: list[Any] = [None, 0, "x", [], [1], {"enabled": "x"}, {"protocols": []}, {"actions": [1, {"pattern": "("}]}]
    for odd in shapes:
        config = shipped()
        for section in ("receivers", "processors", "exporters"):
            config[section] = dict.fromkeys([*config[section], "attributes", "transform", "filter", "kafka"], odd)
        config["service"]["pipelines"]["traces"]["processors"] = ["attributes", "transform", "filter"]
        assert {finding.level for finding in diagnose(config)} <= {"ok", "warning", "error"}
