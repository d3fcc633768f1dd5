"""`spanmill doctor`: what is installed, patched and reachable, and what would lose data. It changes nothing."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from spanmill.doctor import environment, installed, vllm
from spanmill.doctor.finding import Finding

__all__ = ["Finding", "doctor"]

Section = tuple[str, list[Finding]]


def doctor(
    endpoint: str | None = None,
    vllm_urls: Sequence[str] = (),
    configs: Sequence[Path] = (),
    pythons: Sequence[str] = (),
    *,
    as_json: bool = False,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Say what is found; the exit code: 1 if something loses data, else 0.

    `endpoint` is an OTLP endpoint in place of the environment's, `vllm_urls` are base URLs of model servers, `configs`
    configurations of Go collectors, `pythons` other interpreters that agents run by.
    """
    sections = list(examine(endpoint, vllm_urls, configs, pythons, os.environ if environ is None else environ))
    say(as_document(sections) if as_json else as_text(sections))
    return int(any(finding.level == "error" for _, findings in sections for finding in findings))


def examine(
    endpoint: str | None,
    vllm_urls: Sequence[str],
    configs: Sequence[Path],
    pythons: Sequence[str],
    environ: Mapping[str, str],
) -> Iterable[Section]:
    """Section by section, what is found."""
    yield "installed", installed.examine(installed.describe(), environ)
    for python in pythons:
        yield f"python {python}", installed.examine_other(python)
    yield "environment", environment.examine(environ)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what its handshakes meet is said in our words
    from spanmill.doctor import endpoint as endpoints

    yield "endpoint", endpoints.examine(endpoint, environ)
    for url in vllm_urls:
        yield f"vllm {url}", vllm.examine(url, environ)
    for path in configs:
        from spanmill.doctor import collector_config  # the only one that needs more than the base

        yield f"collector config {path}", collector_config.examine(path)


def as_text(sections: Iterable[Section]) -> str:
    """One line a finding under the name of its section, and what it all comes to."""
    lines: list[str] = []
    count = {"ok": 0, "warning": 0, "error": 0}
    for name, findings in sections:
        lines.append(f"{name}:")
        for finding in findings:
            count[finding.level] += 1
            lines.append(f"  {finding.level:<8} {finding}")
    losses = [f"{n} {level}{'s' if n > 1 else ''}" for level, n in count.items() if level != "ok" and n]
    verdict = "data is lost" if count["error"] else "nothing loses data"
    lines.append(f"{verdict} ({', '.join(losses)})" if losses else verdict)
    return "\n".join(lines)


def as_document(sections: Iterable[Section]) -> str:
    """The same as JSON: `{"findings": [{"section", "level", "text", "do"}], "errors", "warnings"}`."""
    findings = [
        {"section": name, "level": finding.level, "text": finding.text, "do": finding.do or None}
        for name, found in sections
        for finding in found
    ]
    counts = {f"{level}s": sum(f["level"] == level for f in findings) for level in ("error", "warning")}
    return json.dumps({"findings": findings, **counts}, indent=2)
