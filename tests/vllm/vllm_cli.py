# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""The `vllm` command, which looks up its version under a name that the wheel for CPUs does not have.

usage: vllm_cli.py serve MODEL …
"""

from importlib import metadata

if __name__ == "__main__":
    from vllm import __version__
    from vllm.entrypoints.cli.main import main

    version_of = metadata.version
    metadata.version = lambda name: f"{__version__}+cpu" if name == "vllm" else version_of(name)
    main()
