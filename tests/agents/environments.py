"""The environments in which the examples run, one for each framework. Run as a program, it makes them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

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
    "instrumentors": (
        "openai",
        "opentelemetry-instrumentation-genai-openai",
        "opentelemetry-instrumentation-openai",
        "openinference-instrumentation-openai",
        "opentelemetry-distro",
    ),
}
"""What is installed in each, beside spanmill and opentelemetry-instrumentation."""


def python_of(name: str) -> Path:
    """The Python of an environment, made or not."""
    return FOLDER / name / "bin" / "python"


def make(name: str) -> None:
    """Make an environment that is not there yet."""
    python = python_of(name)
    if python.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER / name)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *PACKAGES[name], "opentelemetry-instrumentation", "--editable", str(ROOT)], check=True)


if __name__ == "__main__":
    for wanted in sys.argv[1:] or PACKAGES:
        make(wanted)
