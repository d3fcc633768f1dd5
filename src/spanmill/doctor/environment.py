"""What the environment says that loses data: the SDK's limits and samplers, vLLM's plugins, variables nobody reads."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Final
from urllib.parse import unquote

from spanmill.collector.config import BuildConfig, ServeConfig
from spanmill.doctor.finding import Finding, error, ok, warning
from spanmill.instrument import credentials, exporters, hosts, identity, provider, reward_file, run, texts
from spanmill.instrument.vllm import plugin, policy

VALUE_LIMITS: Final = ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT")
COUNT_LIMITS: Final = ("OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_EVENT_COUNT_LIMIT")
CLOSE: Final = 0.8
"""How much of a name must agree with the one that may be meant."""
ENOUGH: Final = 1000
"""Attributes of a span with some hundred messages in a flattened dialect."""
SAMPLERS: Final = ("always_on", "parentbased_always_on")
HEADERS: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
_HEADER: Final = re.compile(r"\s*[\w!#$%&'*+.^`|~-]+\s*=[\t -~]*", re.ASCII)
CONFIG_FILES: Final = ("OTEL_CONFIG_FILE", "OTEL_EXPERIMENTAL_CONFIG_FILE")
SMALL_BATCH: Final = 64
"""Spans in a batch: of 100 KB each they are 6.4 MB, which a receiver with a limit of 64 MiB takes ten times."""

OWN_PROVIDER: Final = "of a program's own TracerProvider"
NAMES: Final = frozenset(
    {
        "SPANMILL_CONFIG",
        "SPANMILL_UPSTREAM",
        "SPANMILL_LISTEN",
        "SPANMILL_EXIT_TIMEOUT",
        "SPANMILL_QUEUE_MIB",
        run.SPANMILL_ENDPOINT,
        reward_file.REWARD_FILE,
        identity.RUN,
        hosts.HOSTS,
        texts.CAPTURE_TEXT,
        plugin.DISABLED,
        policy.ENV,
        policy.FILE,
        credentials.TOKEN,
        *(field.env for field in identity.FIELDS),
    }
)
"""Variables of ours beside those of configuration fields."""


def known_variables() -> frozenset[str]:
    """Every `SPANMILL_*` variable that something reads."""
    options = {f"SPANMILL_{option.name.upper()}" for config in (ServeConfig, BuildConfig) for option in fields(config)}
    return NAMES | options


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """What in an environment loses data; one `ok` if nothing does."""
    found = [
        *_sdk_off(environ),
        *_limits(environ),
        *_sampling(environ),
        *_export(environ),
        *_others(environ),
        *_ours(environ),
    ]
    return found or [ok("no variable of OTEL_*, SPANMILL_* or VLLM_* loses data")]


def _sdk_off(environ: Mapping[str, str]) -> Iterator[Finding]:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield error("OTEL_SDK_DISABLED=true: no span is made, ours neither", "unset it")


def _limits(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in VALUE_LIMITS:
        if environ.get(name):
            yield error(
                f"{name}={environ[name]} cuts token ids and logprobs in spans {OWN_PROVIDER}",
                "unset it (`spanmill run` does)",
            )
    for name in COUNT_LIMITS:
        number = _number(environ.get(name))
        if number is not None and number < ENOUGH:
            yield error(
                f"{name}={number} drops messages and ids from spans {OWN_PROVIDER}",
                f"unset it: spanmill's distro raises it to {provider.ATTRIBUTE_LIMIT}",
            )


def _sampling(environ: Mapping[str, str]) -> Iterator[Finding]:
    sampler = environ.get("OTEL_TRACES_SAMPLER", "always_on").strip().lower()
    if sampler not in SAMPLERS:
        yield error(
            f"OTEL_TRACES_SAMPLER={sampler} samples spans {OWN_PROVIDER} away", "unset it, or set it to always_on"
        )


def _export(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in (exporters.TRACES_ENDPOINT, exporters.ENDPOINT):
        endpoint = environ.get(name)
        if endpoint and "://" not in endpoint:
            yield error(
                f"{name}={endpoint} has no scheme: exporters take it for TLS, or for no address at all",
                f"write http://{endpoint}",
            )
    for name in (exporters.TRACES_PROTOCOL, exporters.PROTOCOL):
        protocol = environ.get(name)
        if protocol and protocol not in (exporters.GRPC, exporters.HTTP):
            yield error(
                f"{name}={protocol}: there is no such exporter, nothing is sent",
                f"set it to {exporters.GRPC} or {exporters.HTTP}",
            )
    exporter = environ.get("OTEL_TRACES_EXPORTER", "otlp").strip()
    if "otlp" not in exporter.split(","):
        yield warning(
            f"OTEL_TRACES_EXPORTER={exporter}: spans reach spanmill only from processes that it instruments",
            "unset it for agents in other languages and for vLLM's own tracing",
        )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "OTEL_EXPORTER_OTLP_COMPRESSION"):
        compression = environ.get(name, "").strip().lower()
        if compression not in ("", "none", "gzip"):
            yield error(
                f"{name}={compression}: over gRPC neither every SDK nor spanmill's receiver has it",
                "use gzip or none; zstd only over HTTP, between collectors",
            )
    for name in ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        seconds = _number(environ.get(name))
        if seconds is not None and seconds < 5:
            yield warning(
                f"{name}={seconds:g}: SDKs in Python give up after {seconds:g} s (others read milliseconds), and an "
                "acknowledgement waits for the disk",
                "leave it at 10 s",
            )
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        path = environ.get(f"OTEL_EXPORTER_OTLP_{name}")
        if path and not _is_pem(path):
            yield error(f"OTEL_EXPORTER_OTLP_{name}={path} is no PEM file: nothing is sent over TLS", "name one")
    for name in HEADERS:
        if any(not is_header(unquote(pair)) for pair in environ.get(name, "").split(",") if pair.strip()):
            yield error(
                f"{name} is not NAME=VALUE, separated by commas: exporters leave such a header out", "correct it"
            )
    batch = _number(environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE"))
    if batch is not None and batch > SMALL_BATCH:
        yield warning(
            f"OTEL_BSP_MAX_EXPORT_BATCH_SIZE={batch:g}: exporters {OWN_PROVIDER} send batches of that many spans, of "
            "100 KB each, which receivers refuse for good above their limit",
            f"use 16 to {SMALL_BATCH}; spanmill's own batches are measured in bytes",
        )


def _others(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in CONFIG_FILES:
        if environ.get(name):
            yield warning(
                f"{name} is set: OpenTelemetry configures itself from that file and reads no OTEL_TRACES_* variable",
                "see that it samples always_on and sets no attribute_value_length_limit",
            )
    propagators = environ.get("OTEL_PROPAGATORS")
    if propagators is not None and not {"tracecontext", "baggage"} <= set(propagators.replace(" ", "").split(",")):
        yield warning(
            f"OTEL_PROPAGATORS={propagators}: a program's own requests do not carry trace and rollout to its servers",
            "add tracecontext,baggage",
        )
    plugins = environ.get("VLLM_PLUGINS")
    if plugins is not None and "spanmill" not in plugins.split(","):
        yield error(f"VLLM_PLUGINS={plugins}: a vLLM started here does not load the plugin", "add spanmill to it")
    if environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        yield error(
            "VLLM_USE_RUST_FRONTEND: a vLLM started here runs no Python plugin", "unset it, or use `spanmill gateway`"
        )


def _ours(environ: Mapping[str, str]) -> Iterator[Finding]:
    if environ.get(plugin.DISABLED) == "0":
        yield error(f"{plugin.DISABLED}=0: the plugin in a vLLM started here does nothing", "unset it")
    if environ.get(hosts.HOSTS) == "":
        yield warning(f"{hosts.HOSTS} is empty: no model server is asked for token ids by agents", "unset it")
    if environ.get(texts.CAPTURE_TEXT) == "0":
        yield warning(f"{texts.CAPTURE_TEXT}=0: messages, answers and tools are not recorded", "unset it to have them")
    for name in ("SPANMILL_EXIT_TIMEOUT", "SPANMILL_QUEUE_MIB"):
        if environ.get(name) and ((number := _number(environ[name])) is None or number < 0):
            yield warning(f"{name}={environ[name]} is no number >= 0: the default is used", "correct or unset it")
    yield from _options(environ)
    known = known_variables()
    for name in sorted(environ):
        if name.startswith("SPANMILL_") and name not in known:
            yield warning(f"{name} is read by nothing", _meant(name, known))


def _options(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Values that stop `spanmill serve` or `build` at their start."""
    options: dict[str, Any] = {
        option.name: option for config in (BuildConfig, ServeConfig) for option in fields(config)
    }
    for name, option in options.items():
        variable = f"SPANMILL_{name.upper()}"
        if variable in environ:
            try:
                option.metadata["parse"](environ[variable])
            except ValueError as expected:  # the value may be a secret
                yield error(f"{variable} stops `spanmill serve` at its start", f"it takes {expected}")


def _meant(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, 1, CLOSE)
    return f"{close[0]} may be meant" if close else "unset it"


def is_header(pair: str) -> bool:
    """Whether NAME=VALUE can be a header of a request."""
    return _HEADER.fullmatch(pair) is not None


def _is_pem(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return b"-----BEGIN" in file.read()
    except OSError:
        return False


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None
