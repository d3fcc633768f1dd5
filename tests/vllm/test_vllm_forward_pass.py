"""Recorded logprobs against an independent forward pass of the same weights."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from running_vllm import HERE, MODEL, Sampled, VllmServer, environment, new_rollout, vllm_python

pytestmark = pytest.mark.vllm

BF16_NOISE = 0.02
"""Of a logprob: logits near 1 have steps of 2**-8 in bf16, and two layers lie before them."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def _sample(server: VllmServer, temperature: float, top_p: float, **headers: str) -> list[Sampled]:
    rollout_id = new_rollout()
    for text in ("hello world", "the quick brown fox", "jumps over", "a lazy dog"):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 100,
            "temperature": temperature,
            "top_p": top_p,
            "ignore_eos": True,
        }
        answer = server.post("/v1/chat/completions", body, x_spanmill_rollout_id=rollout_id, **headers)
        assert answer.status_code == 200, answer.text
    return server.sampled(rollout_id, 4)


def _recompute(model: Path, dtype: str, rows: list[Sampled], temperature: float, top_p: float) -> list[list[float]]:
    items = [
        {"prompt": r.prompt_ids, "response": r.response_ids, "temperature": temperature, "top_p": top_p} for r in rows
    ]
    done = subprocess.run(
        [vllm_python(), str(HERE / "forward_pass.py"), str(model), dtype],
        input=json.dumps(items),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def _compare(recorded: list[list[float]], computed: list[list[float]]) -> tuple[float, float]:
    """(correlation, largest difference) over all tokens whose computed logprob is finite."""
    one = np.asarray([x for row in recorded for x in row])
    other = np.asarray([x for row in computed for x in row])
    finite = np.isfinite(other)
    assert finite.mean() > 0.98  # rounding may move a token over the edge of top-p
    one, other = one[finite], other[finite]
    return float(np.corrcoef(one, other)[0, 1]), float(np.abs(one - other).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_raw_logprobs(vllm: VllmServer, tiny_model: Path, dtype: str) -> None:
    """Raw logprobs are the model's own, token by token; shifted by one they are not."""
    rows = _sample(vllm, 1.0, 1.0)
    recorded = [row.logprobs for row in rows]
    computed = _recompute(tiny_model, dtype, rows, 1.0, 1.0)
    correlation, difference = _compare(recorded, computed)
    assert correlation > 0.999
    assert difference < BF16_NOISE
    shifted = [row[1:] for row in recorded], [row[:-1] for row in computed]
    correlation, difference = _compare(*shifted)
    assert correlation < 0.9
    assert difference > BF16_NOISE


def test_processed_logprobs(vllm_with_key: VllmServer, tiny_model: Path) -> None:
    """Processed logprobs are those of the distribution that was sampled from: temperature 0.7, top-p 0.9."""
    rows = _sample(vllm_with_key, 0.7, 0.9, authorization="Bearer secret")
    recorded = [row.logprobs for row in rows]
    correlation, difference = _compare(recorded, _recompute(tiny_model, "float32", rows, 0.7, 0.9))
    assert correlation > 0.999
    assert difference < BF16_NOISE / 0.7
    _, difference = _compare(recorded, _recompute(tiny_model, "float32", rows, 1.0, 1.0))
    assert difference > BF16_NOISE / 0.7
