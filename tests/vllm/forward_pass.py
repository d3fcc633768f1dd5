# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Logprobs of given answers by a forward pass of transformers over the same weights.

usage: forward_pass.py MODEL_DIR DTYPE < INPUT > OUTPUT

Input and output are JSON. Input: [{"prompt": ids, "response": ids, "temperature": float, "top_p": float}, ...].
Output: [[logprob of each response id under softmax(logits / temperature) cut to top_p], ...].
"""

import json
import sys

import torch
from transformers import LlamaForCausalLM


def cut_to_top_p(logprobs, top_p):
    """Only the likeliest tokens whose probabilities reach `top_p` together keep theirs, to a sum of one."""
    ordered, order = logprobs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.zeros_like(logprobs, dtype=torch.bool).scatter(-1, order, before < top_p)
    return logprobs.masked_fill(~kept, float("-inf")).log_softmax(-1)


model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2])).eval()
answers = []
with torch.no_grad():
    for item in json.load(sys.stdin):
        prompt, response = item["prompt"], item["response"]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = cut_to_top_p((logits / item["temperature"]).log_softmax(-1), item["top_p"])
        answers.append(logprobs.gather(-1, torch.tensor(response)[:, None])[:, 0].tolist())
json.dump(answers, sys.stdout)
