import re
from pathlib import Path

import pytest

from spanmill.doctor.environment import examine, known_variables
from spanmill.doctor.finding import Finding

ROOT = Path(__file__).parents[2]


def test_nothing_is_lost_by_nothing() -> None:
    """An environment without any variable of ours loses nothing."""
    assert [Finding("ok", "no variable of OTEL_*, SPANMILL_* or VLLM_* loses data")] == examine({"PATH": "/bin"})


def test_what_spanmill_run_sets_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a child of `spanmill run` is what the doctor wants it to be."""
    from opentelemetry.context import Context

    from spanmill.instrument.identity import Identity
    from spanmill.instrument.run import child_environment

    losing = {"OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "100", "OTEL_TRACES_SAMPLER": "always_off"}
    env = child_environment(Identity("r"), losing, Context(), endpoint="http://127.0.0.1:4318")
    assert ["ok"] == [finding.level for finding in examine(env)]


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("OTEL_SDK_DISABLED", "true", "error"),
        ("OTEL_SDK_DISABLED", "false", "ok"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "4096", "error"),
        ("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", "1", "error"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "128", "error"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "10000", "ok"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "5", "error"),
        ("OTEL_TRACES_SAMPLER", "traceidratio", "error"),
        ("OTEL_TRACES_SAMPLER", "parentbased_always_on", "ok"),
        ("OTEL_TRACES_EXPORTER", "none", "warning"),
        ("OTEL_TRACES_EXPORTER", "console,otlp", "ok"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317", "error"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317", "ok"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "error"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "ok"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "error"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip", "ok"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "1", "warning"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such/file.pem", "error"),
        ("OTEL_EXPORTER_OTLP_CLIENT_KEY", __file__, "error"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=c", "error"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t%0Ax", "error"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "x=\u20ac", "error"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization", "error"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t, x-a=b==", "ok"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "512", "warning"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "32", "ok"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "many", "ok"),
        ("OTEL_CONFIG_FILE", "otel.yaml", "warning"),
        ("OTEL_PROPAGATORS", "b3", "warning"),
        ("OTEL_PROPAGATORS", "baggage, tracecontext", "ok"),
        ("VLLM_PLUGINS", "other", "error"),
        ("VLLM_PLUGINS", "other,spanmill", "ok"),
        ("VLLM_USE_RUST_FRONTEND", "1", "error"),
        ("SPANMILL_VLLM", "0", "error"),
        ("SPANMILL_HOSTS", "", "warning"),
        ("SPANMILL_HOSTS", "*", "ok"),
        ("SPANMILL_CAPTURE_TEXT", "0", "warning"),
        ("SPANMILL_QUEUE_MIB", "-1", "warning"),
        ("SPANMILL_EXIT_TIMEOUT", "soon", "warning"),
        ("SPANMILL_GRPC", "nowhere", "error"),
        ("SPANMILL_SETTLE", "10s", "ok"),
        ("SPANMILL_ROLLOUT_ID", "r", "ok"),
    ],
)
def test_a_variable(name: str, value: str, level: str) -> None:
    """Each setting that loses data is found, and its harmless neighbour is not."""
    (found,) = examine({name: value})
    assert (level, True) == (found.level, level == "ok" or (name in found.text and found.do != ""))


def test_a_misspelt_variable() -> None:
    """A variable of ours that nothing reads is named, with the one that may be meant."""
    found = examine({"SPANMILL_ROLOUT_ID": "r", "SPANMILL_XYZ": "1"})
    assert [
        Finding("warning", "SPANMILL_ROLOUT_ID is read by nothing", "SPANMILL_ROLLOUT_ID may be meant"),
        Finding("warning", "SPANMILL_XYZ is read by nothing", "unset it"),
    ] == found


def test_a_value_that_may_be_a_secret_is_not_shown() -> None:
    """What stands in a variable of headers is never repeated."""
    (found,) = examine({"SPANMILL_FORWARD_HEADERS": "sesame"})
    assert ("error", False) == (found.level, "sesame" in str(found))


def test_every_variable_is_known() -> None:
    """Every variable that the source of the stages spells is known to the doctor."""
    folders = [ROOT / name for name in ("instrument", "collector", "adapters", "triplets", "src/spanmill")]
    files = [file for folder in folders for file in folder.rglob("*.py") if not file.is_relative_to(folder / "doctor")]
    spelt = {name for file in files for name in re.findall(r'"(SPANMILL_[A-Z_]*[A-Z])"', file.read_text())}
    assert set() == spelt - known_variables()
