"""A Go collector's configuration, read for what would lose spans on their way to spanmill. Pure, but for `examine`.

Only what stands in a pipeline of traces that leads to spanmill counts: a sampler on the backend's leg is nobody's loss.
An exporter is spanmill's if its name or endpoint says so; if none does, every OTLP exporter may be.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import yaml

from spanmill.doctor.finding import Finding, error, ok, warning

Config = Mapping[str, Any]

MIB: Final = 1 << 20
GRPC_DEFAULT_MIB: Final = 4
LARGE_MIB: Final = 64
"""What spanmill's own receiver takes, and what the OTLP specification recommends."""
LARGE_SPAN: Final = 8 * MIB
"""A span of a long context with its messages, its ids as arrays."""

GRPC_EXPORTERS: Final = ("otlp", "otlp_grpc")
HTTP_EXPORTERS: Final = ("otlphttp", "otlp_http")
HTTP_ENCODINGS: Final = ("", "none", "gzip", "zstd", "deflate", "zlib")
CUTS: Final = re.compile(
    r"\b(truncate_all|limit|delete_key|delete_matching_keys|keep_keys|keep_matching_keys|replace_all_matches|"
    r"replace_all_patterns|Substring)\s*\("
)
"""Functions of the transform language that shorten or remove attributes."""


class Part(NamedTuple):
    """A component of a configuration, in a pipeline that leads to spanmill."""

    kind: str
    """Its type, in snake case."""
    name: str
    """As it stands in the file."""
    config: Config


def examine(path: Path) -> list[Finding]:
    """What a configuration file loses."""
    try:
        content: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as failure:
        return [error(f"{path} cannot be read: {failure.strerror}", "name a collector's configuration file")]
    except (yaml.YAMLError, UnicodeDecodeError) as failure:
        return [error(f"{path} is no YAML: {' '.join(str(failure).split())}", "name a collector's configuration file")]
    return diagnose(content)


def diagnose(content: object) -> list[Finding]:
    """What a configuration loses; one `ok` if nothing."""
    config = _object(content)
    pipelines = _object(_object(config.get("service")).get("pipelines"))
    traces = {name: _object(p) for name, p in pipelines.items() if str(name).partition("/")[0] == "traces"}
    if not traces:
        return [error("it has no pipeline of traces: no span gets through", "add one that ends in spanmill's exporter")]
    ours = _exporters_to_spanmill(config)
    leading = {name: p for name, p in traces.items() if _leads(name, traces, ours, config)}
    if not leading:
        return [
            error(
                "no pipeline of traces ends in an OTLP exporter: spanmill gets nothing",
                "add one, as in otel-config.yaml",
            )
        ]
    found = [
        finding
        for section, look in (("receivers", _receiver), ("processors", _processor), ("exporters", _exporter))
        for part in _parts(config, leading, section, ours)
        for finding in look(part)
    ]
    found += _logs(pipelines, ours)
    return found or [ok("nothing in it loses spans on their way to spanmill")]


def _parts(config: Config, pipelines: Mapping[str, Config], section: str, ours: set[str]) -> Iterator[Part]:
    defined = _object(config.get(section))
    names = dict.fromkeys(str(name) for p in pipelines.values() for name in _list(p.get(section)))
    for name in names:
        if name in defined and (section != "exporters" or name in ours):
            yield Part(_kind(name), name, _object(defined[name]))


def _exporters_to_spanmill(config: Config) -> set[str]:
    exporters = {str(name): _object(e) for name, e in _object(config.get("exporters")).items()}
    named = {name for name, e in exporters.items() if "spanmill" in f"{name} {e.get('endpoint')} {e.get('protocol')}"}
    kinds = (*GRPC_EXPORTERS, *HTTP_EXPORTERS, "load_balancing", "kafka")
    return named or {name for name in exporters if _kind(name) in kinds}


def _leads(name: str, traces: Mapping[str, Config], ours: set[str], config: Config) -> bool:
    """Whether a pipeline ends in one of our exporters, by way of connectors or not."""
    connectors = {str(n) for n in _object(config.get("connectors"))}
    seen: set[str] = set()
    open_ends = [name]
    while open_ends:
        at = open_ends.pop()
        seen.add(at)
        ends = {str(e) for e in _list(traces[at].get("exporters"))}
        if ends & ours:
            return True
        joined = ends & connectors
        open_ends += [
            n for n, p in traces.items() if n not in seen and joined & {str(r) for r in _list(p.get("receivers"))}
        ]
    return False


def _kind(name: str) -> str:
    """The type of a component, older spellings as the newer: `otlphttp/x` and `loadbalancing` are written so, too."""
    kind = name.partition("/")[0]
    return {
        "loadbalancing": "load_balancing",
        "tailsampling": "tail_sampling",
        "probabilisticsampler": "probabilistic_sampler",
        "group_by_trace": "groupbytrace",
        "memorylimiter": "memory_limiter",
    }.get(kind, kind)


# ------------------------------------------------------------------ receivers


def _receiver(part: Part) -> Iterator[Finding]:
    if part.kind != "otlp":
        return
    protocols = _object(part.config.get("protocols"))
    if "grpc" in protocols:
        mib = _number(_object(protocols["grpc"]).get("max_recv_msg_size_mib"), GRPC_DEFAULT_MIB)
        if mib is not None and mib < LARGE_MIB:
            yield error(
                f"receiver {part.name}: max_recv_msg_size_mib is {mib:g}: a larger batch is refused for good, and its "
                "sender drops it",
                f"set it to {LARGE_MIB}",
            )
    if "http" in protocols:
        size = _number(_object(protocols["http"]).get("max_request_body_size"), 20 * MIB)
        if size is not None and 0 < size < LARGE_MIB * MIB:
            yield error(
                f"receiver {part.name}: max_request_body_size is {size / MIB:g} MiB: a larger batch is refused for "
                "good, and its sender drops it",
                f"set it to {LARGE_MIB * MIB}",
            )


# ------------------------------------------------------------------ processors


def _processor(part: Part) -> Iterator[Finding]:
    look = _PROCESSORS.get(part.kind)
    if look is not None:
        yield from look(part)


def _sampler(part: Part) -> Iterator[Finding]:
    yield error(
        f"processor {part.name} samples training data away",
        "move it to a pipeline of the backend's own, behind a forward connector",
    )


def _batch(part: Part) -> Iterator[Finding]:
    yield warning(
        f"processor {part.name} acknowledges before it exports, swallows errors, and has no limit in bytes",
        "take it out, and use sending_queue.batch with sizer: bytes on the exporter",
    )


def _filter(part: Part) -> Iterator[Finding]:
    if _object(part.config.get("traces")) or _list(part.config.get("trace_conditions")) or part.config.get("spans"):
        yield warning(
            f"processor {part.name} drops spans: with parents go the rollout ids that their children inherit",
            "drop whole traces, or nothing, on the way to spanmill",
        )


def _group_by_trace(part: Part) -> Iterator[Finding]:
    yield error(
        f"processor {part.name} holds traces in memory and gives up those that take longer than its wait",
        "take it out: spanmill groups",
    )


def _memory_limiter(part: Part) -> Iterator[Finding]:
    limit = _number(part.config.get("limit_mib"), None)
    if limit is not None and limit < 512:
        yield warning(
            f"processor {part.name}: limit_mib is {limit:g}, which a few batches of token ids fill: it refuses, and "
            "SDKs in Python give up after 10 s",
            "allow 1024 or more",
        )


def _attributes(part: Part) -> Iterator[Finding]:
    for action in map(_object, _list(part.config.get("actions"))):
        does, of = action.get("action"), str(action.get("key") or action.get("pattern") or "")
        if does in ("delete", "hash", "extract", "convert") and _is_read(of, is_pattern="pattern" in action):
            yield error(
                f"processor {part.name}: {does} of {of} changes what spanmill reads",
                "leave spanmill.* and gen_ai.* alone",
            )


def _is_read(key: str, *, is_pattern: bool) -> bool:
    if not is_pattern:
        return key.startswith(("spanmill.", "gen_ai.", "llm."))
    try:
        return re.search(key, "spanmill.response.token_ids gen_ai.response.id") is not None
    except re.error:
        return True


def _transform(part: Part) -> Iterator[Finding]:
    for statement in _statements(part.config.get("trace_statements")):
        if (cut := CUTS.search(statement)) is not None:
            yield error(
                f"processor {part.name}: {cut[1]}() shortens or removes attributes: such calls end in quarantine",
                "leave spanmill.* and gen_ai.* alone, or transform on the backend's leg only",
            )


def _statements(value: object) -> Iterator[str]:
    for item in _list(value):
        if isinstance(item, str):
            yield item
        else:
            yield from _statements(_object(item).get("statements"))


def _redaction(part: Part) -> Iterator[Finding]:
    if part.config.get("allow_all_keys") is not True:
        yield error(
            f"processor {part.name} removes every attribute that it does not list",
            "set allow_all_keys: true, or list spanmill.* and gen_ai.*",
        )
    elif _list(part.config.get("blocked_values")) or _list(part.config.get("blocked_key_patterns")):
        yield warning(
            f"processor {part.name} masks what matches blocked_values: base64 of token ids may",
            "redact on the backend's leg only",
        )


_PROCESSORS: Final[Mapping[str, Callable[[Part], Iterator[Finding]]]] = {
    "tail_sampling": _sampler,
    "probabilistic_sampler": _sampler,
    "batch": _batch,
    "filter": _filter,
    "groupbytrace": _group_by_trace,
    "memory_limiter": _memory_limiter,
    "attributes": _attributes,
    "transform": _transform,
    "redaction": _redaction,
}


# ------------------------------------------------------------------ exporters


def _exporter(part: Part) -> Iterator[Finding]:
    if part.kind in GRPC_EXPORTERS or part.kind in HTTP_EXPORTERS:
        yield from _compression(part, _text(part.config.get("compression")))
        yield from _connection(part)
    if part.kind == "kafka":
        size = _number(_object(part.config.get("producer")).get("max_message_bytes"), 1_000_000)
        if size is not None and size < LARGE_SPAN:
            yield error(
                f"exporter {part.name}: max_message_bytes is {size:g}: larger messages are dropped",
                f"set it to {LARGE_MIB * MIB}, in the broker too",
            )
    if part.kind == "load_balancing":
        yield from _balancing(part)
    else:
        yield from _queue(part)


def _compression(part: Part, encoding: str) -> Iterator[Finding]:
    if part.kind in GRPC_EXPORTERS and encoding not in ("", "none", "gzip"):
        yield error(
            f"exporter {part.name}: no Python gRPC server reads compression: {encoding}; every batch is dropped",
            "use none or gzip; zstd with otlp_http",
        )
    elif part.kind in HTTP_EXPORTERS and encoding not in HTTP_ENCODINGS:
        yield error(
            f"exporter {part.name}: spanmill does not read compression: {encoding}, and every batch is dropped",
            "use zstd, gzip or none",
        )


def _connection(part: Part) -> Iterator[Finding]:
    endpoint = _text(part.config.get("endpoint"))
    insecure = _object(part.config.get("tls")).get("insecure")
    if part.kind in GRPC_EXPORTERS and "://" not in endpoint and insecure is not True:
        yield warning(
            f"exporter {part.name} uses TLS, which `spanmill serve` speaks only with --tls-cert",
            "set tls: {insecure: true} where it does not",
        )
    seconds = _seconds(part.config.get("timeout"))
    if seconds is not None and 0 < seconds < 5:
        yield warning(
            f"exporter {part.name}: timeout is {seconds:g} s, and an acknowledgement waits for the disk",
            "set it to 30s",
        )


def _queue(part: Part) -> Iterator[Finding]:
    retry = _object(part.config.get("retry_on_failure"))
    longest = _seconds(retry.get("max_elapsed_time"))
    if retry.get("enabled") is False:
        yield error(
            f"exporter {part.name}: without retry_on_failure every batch that meets a busy or restarting spanmill is "
            "dropped",
            "enable it, with max_elapsed_time: 0",
        )
    elif "max_elapsed_time" not in retry or (longest is not None and longest > 0):
        yield warning(
            f"exporter {part.name} drops spans when spanmill is away for longer than {longest or 300:g} s",
            "set retry_on_failure.max_elapsed_time: 0",
        )
    queue = _object(part.config.get("sending_queue"))
    if queue.get("enabled") is False:
        return
    if queue.get("block_on_overflow") is not True:
        yield warning(
            f"exporter {part.name} drops spans when its sending_queue is full",
            "set block_on_overflow: true and sizer: bytes",
        )
    batch = _object(queue.get("batch"))
    sizer, most = batch.get("sizer", queue.get("sizer")), _number(batch.get("max_size"), None)
    if sizer == "bytes" and most is not None and 0 < most < LARGE_SPAN:
        yield error(
            f"exporter {part.name}: sending_queue.batch.max_size is {most:g} bytes: a larger span is dropped, and the "
            "spans behind it in its batch with it",
            "set it to 33554432",
        )


def _balancing(part: Part) -> Iterator[Finding]:
    if "spanmill.rollout.id" not in _list(part.config.get("routing_attributes")):
        yield warning(
            f"exporter {part.name} does not route on spanmill.rollout.id: one rollout's spans reach several receivers",
            "set routing_key: attributes and routing_attributes: [spanmill.rollout.id], or `spanmill build` over all "
            "journals",
        )
    inner = _object(_object(part.config.get("protocol")).get("otlp"))
    within = Part("otlp_grpc", part.name, {"endpoint": "http://resolved", **inner})
    yield from _compression(within, _text(inner.get("compression")))
    yield from _queue(within)


def _logs(pipelines: Config, ours: set[str]) -> Iterator[Finding]:
    ends = {
        str(e)
        for name, p in pipelines.items()
        if str(name).partition("/")[0] == "logs"
        for e in _list(_object(p).get("exporters"))
    }
    if not ends & ours:
        yield warning(
            "no pipeline of logs ends in spanmill: prompts, answers and rewards that come as log records are lost",
            "add one beside that of traces",
        )


# ------------------------------------------------------------------ values


def _object(value: object) -> Config:
    return cast("Config", value) if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _text(value: object) -> str:
    return value.strip().lower() if isinstance(value, str) else ""


def _number(value: object, default: float | None) -> float | None:
    """A number; `default` if there is none; None if it cannot be told, as of `${env:SIZE}`."""
    if value is None:
        return default
    try:
        return float(cast("Any", value))
    except (TypeError, ValueError):
        return None


def _seconds(value: object) -> float | None:
    """A Go duration such as 1m30s, or 0; None if there is none or it cannot be told."""
    text = str(value) if value is not None else ""
    if re.fullmatch(r"0|(\d+(\.\d+)?(ms|us|ns|s|m|h))+", text) is None:
        return None
    scale = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
    return sum(float(number) * scale[unit] for number, unit in re.findall(r"([\d.]+)(ms|us|ns|s|m|h)", text))
