"""The environment with the trainers that install on a CPU. Run as a program, it makes it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = Path(os.environ.get("SPANMILL_TRAINERS", str(ROOT / ".trainers")))
PYTHON: Final = FOLDER / "bin" / "python"

TORCH: Final = os.environ.get("SPANMILL_TORCH", "torch")
"""A requirement, or the path of a wheel: one for the CPU is a tenth of the usual one."""

PACKAGES: Final = (
    "trl==1.16.0",
    "transformers==5.24.0",
    "datasets",
    "tinker==0.38.0",
    "safetensors",
    "polars",
)
PARTS: Final = ("verl==0.9.1", "areal==1.0.4", "skyrl==0.3.0", "tinker-cookbook==0.6.1", "atif==1.8.0")
"""Installed without what they ask for: engines and kernels that need a GPU."""
OF_PARTS: Final = (
    "aiofiles",
    "aiohttp",
    "blobfile",
    "cachetools",
    "chz",
    "codetiming",
    "colorlog",
    "einops",
    "fastapi",
    "flask",
    "hydra-core",
    "jaxtyping",
    "lark",
    "loguru",
    "numba",
    "openai",
    "peft",
    "pillow",
    "ray",
    "tenacity",
    "tensordict",
    "torchdata",
)
"""What their modules that are tested import."""


def make() -> None:
    """Make the environment if it is not there yet."""
    if PYTHON.exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, TORCH], check=True)
    subprocess.run([*install, *PACKAGES, *OF_PARTS], check=True)
    subprocess.run([*install, "--no-deps", *PARTS], check=True)


if __name__ == "__main__":
    make()
