"""Reads vLLM's source, without importing it, for what the plugin relies on: names, arguments, fields."""

import ast
from pathlib import Path
from typing import Final

METHODS: Final = {
    ("v1/engine/async_llm.py", "AsyncLLM", "generate"): ("prompt", "sampling_params", "request_id"),
    ("v1/engine/llm_engine.py", "LLMEngine", "add_request"): ("request_id", "prompt", "params"),
    ("v1/engine/llm_engine.py", "LLMEngine", "step"): (),
    ("v1/engine/llm_engine.py", "LLMEngine", "abort_request"): ("request_ids",),
}
"""By file, class and method, how its arguments begin after `self`."""

FIELDS: Final = {
    ("outputs.py", "CompletionOutput"): (
        ["index", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"]
    ),
    ("sampling_params.py", "SamplingParams"): (
        ["n", "temperature", "top_p", "top_k", "max_tokens", "logprobs", "prompt_logprobs", "output_kind", "extra_args"]
    ),
    ("logprobs.py", "Logprob"): ["logprob"],
    ("lora/request.py", "LoRARequest"): ["lora_name"],
    ("config/model.py", "ModelConfig"): ["logprobs_mode", "served_model_name"],
}
"""By file and class, fields that it declares."""

ATTRIBUTES: Final = {
    ("outputs.py", "RequestOutput"): ["request_id", "prompt_token_ids", "outputs", "finished", "num_cached_tokens"],
    ("v1/engine/async_llm.py", "AsyncLLM"): ["model_config"],
    ("v1/engine/llm_engine.py", "LLMEngine"): ["model_config"],
}
"""By file and class, attributes that it sets on `self`."""

TEXTS: Final = {
    "vllm.general_plugins": "plugins/__init__.py",
    ".engine_client = engine_client": "entrypoints",
    'f"{request_id}-{i}"': "entrypoints",
    'f"cmpl-': "entrypoints",
    'f"chatcmpl-': "entrypoints",
    "def beam_search(": "entrypoints",
}
"""What stands somewhere in a file or folder: how apps get their engine, how ids are made."""


def missing(package: Path) -> list[str]:
    """What the plugin relies on and the vLLM in `package` (its `vllm` folder) has not; empty if all of it is there."""
    found = [
        f"{name}.{method}{arguments}"
        for (file, name, method), arguments in METHODS.items()
        if _arguments(_class(package / file, name), method)[: len(arguments)] != arguments
    ]
    for (file, name), fields in FIELDS.items():
        declared = _fields(_class(package / file, name))
        found += [f"{name}.{field}" for field in fields if field not in declared]
    for (file, name), attributes in ATTRIBUTES.items():
        set_on_self = _set_on_self(_class(package / file, name))
        found += [f"{name}.{attribute}" for attribute in attributes if attribute not in set_on_self]
    return found + [f"{text} in {place}" for text, place in TEXTS.items() if not _stands(text, package / place)]


def _class(file: Path, name: str) -> ast.ClassDef | None:
    if not file.exists():
        return None
    tree = ast.parse(file.read_text())
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _arguments(owner: ast.ClassDef | None, method: str) -> tuple[str, ...]:
    for node in owner.body if owner is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == method:
            return tuple(argument.arg for argument in node.args.args[1:])
    return ("no such method",)


def _fields(owner: ast.ClassDef | None) -> set[str]:
    nodes = owner.body if owner is not None else []
    return {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def _set_on_self(owner: ast.ClassDef | None) -> set[str]:
    nodes = ast.walk(owner) if owner is not None else ()
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def _stands(text: str, place: Path) -> bool:
    files = [place] if place.is_file() else place.rglob("*.py")
    return any(text in file.read_text() for file in files)
