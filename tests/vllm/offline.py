# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Uses vLLM in process, `LLM.generate` and `LLM.chat`, under a rollout, and prints what it returned.

usage: offline.py MODEL_DIR

Prints a JSON object a line: {"what": …, "choices": [[choice, prompt ids, response ids, logprobs or null], …]}.
"""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

import spanmill.instrument
from spanmill.instrument import vllm as plugin


def tell(what, outputs):
    """Print the choices of answers."""
    choices = [
        [
            part.index,
            list(output.prompt_token_ids),
            list(part.token_ids),
            None
            if part.logprobs is None
            else [entry[i].logprob for i, entry in zip(part.token_ids, part.logprobs, strict=True)],
        ]
        for output in outputs
        for part in output.outputs
    ]
    print(json.dumps({"what": what, "choices": choices}), flush=True)


def main():
    """Generate in every way."""
    # Without a plugin too, bfloat16 in process has ended vLLM 0.32's worker with SIGILL on some CPUs.
    llm = LLM(sys.argv[1], max_model_len=1024, dtype="float32", enforce_eager=True, served_model_name="tiny")
    messages = [{"role": "user", "content": "hello world"}]
    with spanmill.instrument.rollout("asks"):
        tell("asks", llm.generate(["the fox", "hello"], SamplingParams(n=2, max_tokens=9, seed=5, logprobs=2)))
    with spanmill.instrument.rollout("silent"):
        tell("silent", llm.generate(["the fox", "hello"], SamplingParams(n=2, max_tokens=9, seed=5)))
    plugin.set_policy_version(7)
    with spanmill.instrument.rollout("chat"):
        tell("chat", llm.chat(messages, SamplingParams(max_tokens=9, logprobs=0)))
    with spanmill.instrument.rollout("skipped"), plugin.skip():
        llm.chat(messages, SamplingParams(max_tokens=2))
    with spanmill.instrument.rollout("beams"):
        llm.beam_search([{"prompt": "the fox"}], BeamSearchParams(beam_width=2, max_tokens=3))
    plugin.flush()
    print(json.dumps(plugin.counters()._asdict()), flush=True)


if __name__ == "__main__":
    main()
