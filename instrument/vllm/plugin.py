"""The entry point in `vllm.general_plugins`: patches what vLLM imports, when it imports it.

vLLM loads the plugin in every one of its processes. Those that never import the API or an engine's front end, the
engine core and its workers, are left as they are.
"""

import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

import wrapt

from spanmill.instrument.reports import LOGGER, guarded, report
from spanmill.instrument.vllm import hooks, policy, sender
from spanmill.instrument.vllm.middleware import Middleware

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

DISABLED: Final = "SPANMILL_VLLM"
"""Set to 0, the plugin does nothing."""

HOOKS: Final[dict[str, tuple[tuple[str, Wrapper], ...]]] = {
    "vllm.v1.engine.async_llm": (("AsyncLLM.generate", hooks.generate),),
    "vllm.v1.engine.llm_engine": (
        ("LLMEngine.add_request", hooks.add_request),
        ("LLMEngine.step", hooks.step),
        ("LLMEngine.abort_request", hooks.abort_request),
    ),
    "vllm.entrypoints.llm": (("LLM.beam_search", hooks.beam_search),),
}
"""By module, what is wrapped in it. All of a module's names are there, or none is wrapped."""

TESTED: Final = ("0.11", "0.33")
"""The oldest and newest vLLM in which these names were found."""

_registered = False
_active: list[str] = []


def register() -> None:
    """Put the hooks in place; called by vLLM, in every process, possibly more than once."""
    global _registered
    if _registered or os.environ.get(DISABLED) == "0":
        return
    _registered = True
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.WARNING)  # something in vLLM's process raises the root logger's to ERROR
    with guarded("vLLM plugin"):
        policy.share()
        for name, wrappers in HOOKS.items():
            wrapt.register_post_import_hook(_patcher(wrappers), name)
        wrapt.register_post_import_hook(_patch_apps("Starlette"), "starlette.applications")
        wrapt.register_post_import_hook(_patch_apps("FastAPI"), "fastapi.applications")


def active() -> list[str]:
    """Names of vLLM that are wrapped in this process."""
    return list(_active)


def _patcher(wrappers: tuple[tuple[str, Wrapper], ...]) -> Callable[[ModuleType], None]:
    def patch(module: ModuleType) -> None:
        with guarded(f"vLLM plugin {module.__name__}"):
            missing = [name for name, _ in wrappers if not _has(module, name)]
            if missing:
                report(
                    f"vllm {module.__name__}",
                    f"{module.__name__} of vLLM {vllm_version()} has no {', '.join(missing)}: it is not recorded; "
                    f"tested are {TESTED[0]} to {TESTED[1]}",
                    counted=False,
                )
                return
            for name, wrapper in wrappers:
                wrapt.wrap_function_wrapper(module, name, wrapper)
                _active.append(f"{module.__name__}.{name}")

    return patch


def _has(module: ModuleType, name: str) -> bool:
    owner, _, method = name.partition(".")
    return callable(getattr(getattr(module, owner, None), method, None))


def _patch_apps(kind: str) -> Callable[[ModuleType], None]:
    """Put the middleware around every app of this process where its stack is built; only vLLM's app makes it act.

    Whatever function made the app, whichever module `python -m` runs as `__main__`, and however the app is served, its
    stack is built there. vLLM gives its app the engine later.
    """

    def build(wrapped: Callable[..., Any], app: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Middleware(
            wrapped(*args, **kwargs),
            lambda: getattr(app.state, "engine_client", None),
            status,
        )

    def patch(module: ModuleType) -> None:
        with guarded(f"vLLM plugin {kind}"):
            if "build_middleware_stack" in vars(getattr(module, kind)):  # inherited, it is patched there
                wrapt.wrap_function_wrapper(module, f"{kind}.build_middleware_stack", build)

    return patch


def status(engine: Any) -> dict[str, Any]:
    """What this process says of itself at `/spanmill/status`; with several API servers each says its own."""
    config = engine.model_config
    mode = getattr(config, "logprobs_mode", "raw_logprobs")
    return {
        "pid": os.getpid(),
        "spanmill": _version("spanmill"),
        "vllm": vllm_version(),
        "active": active(),
        "logprobs_mode": str(getattr(mode, "value", mode)),
        "counters": sender.counters()._asdict(),
    }


def vllm_version() -> str | None:
    """The version of the vLLM in this process, which may be installed under several names."""
    module = sys.modules.get("vllm")
    return getattr(module, "__version__", None) or _version("vllm")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
