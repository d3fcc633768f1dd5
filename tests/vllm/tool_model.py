# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ruff: noqa: E501, SIM905, UP031  # a chat template and data
"""Makes a tiny Llama (about 1M parameters) that has learnt one thing: to call tools in the Hermes format.

A random model never calls a tool under tool_choice=auto. Some minutes of training on synthetic conversations make it
do so, with real sampling noise, so that real agents run their real loops against a real engine. The tests use the one
in tool_calling_model/, which this has made.

usage: tool_model.py OUT_DIR [STEPS]
"""

import json
import random
import sys

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = sys.argv[1]
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 500
rng = random.Random(7)
torch.manual_seed(7)

TEMPLATE = r"""{%- macro sys(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endmacro -%}
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' or messages[0].role == 'developer' %}{{ sys(messages[0].content) }}

{% endif %}# Tools
<tools>
{% for t in tools %}{{ t | tojson }}
{% endfor %}</tools>
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% elif messages[0].role == 'system' or messages[0].role == 'developer' %}<|im_start|>system
{{ sys(messages[0].content) }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>tool
{{ sys(m.content) }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{% if m.content %}{{ sys(m.content) }}{% endif %}{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.function is defined %}{% set c = c.function %}{% endif %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ c.name }}", "arguments": {% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}}
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% elif not loop.first or (m.role != 'system' and m.role != 'developer') %}<|im_start|>{{ m.role }}
{{ sys(m.content) }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ITEMS = ["apple", "pear", "plum", "fig", "lemon", "melon", "grape", "cherry"]


def tool(name, desc, props):
    """A tool in OpenAI chat shape."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": desc,
            "parameters": {"type": "object", "properties": props, "required": list(props)},
        },
    }


TOOLS = [
    tool("lookup", "Look up the price of an item.", {"item": {"type": "string", "description": "name of the item"}}),
    tool("add", "Add two integers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
]


def vary(t):
    """Frameworks write the same tool in many ways: titles, strict, additionalProperties, key order."""
    t = json.loads(json.dumps(t))
    f = t["function"]
    p = f["parameters"]
    if rng.random() < 0.5:
        p["additionalProperties"] = False
    if rng.random() < 0.4:
        for k, v in p["properties"].items():
            v["title"] = k.capitalize()
            v.pop("description", None)
        if rng.random() < 0.5:
            p["title"] = f["name"] + "_args"
    if rng.random() < 0.3:
        f["strict"] = True
    if rng.random() < 0.3:
        f["parameters"] = {k: p[k] for k in sorted(p)}
    if rng.random() < 0.2:
        t = {"function": f, "type": "function"}
    return t


SYS = [
    "You are a shopping assistant. Use the tools, then answer in one sentence.",
    "You are a helpful agent.",
    "Use the tools to answer.",
    "Be brief.",
    "You are a careful assistant who checks prices with tools before answering.",
    None,
]
WORDS = "the agent must always read its instructions and use a tool when one is given then write short plain answers for every user question about prices items and totals".split()
LEAD = ["Let me check.", "I will look that up.", "One moment, please.", "First I need the price."]
END = [
    "The total is %d.",
    "It costs %d coins.",
    "The answer is %d.",
    "That makes %d coins in total.",
    "I found %d as the price, thank you for waiting.",
]


def call(name, args):
    """A tool call in OpenAI chat shape."""
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": args}}


def conversation():
    """Messages of a user who asks for prices and an assistant who calls tools."""
    msgs = []
    s = rng.choice(SYS)
    if s and rng.random() < 0.25:
        s += " " + " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60)))
    if s:
        msgs.append({"role": "system", "content": s})
    a, b = rng.sample(ITEMS, 2)
    tag = "task-%08x" % rng.getrandbits(32)
    msgs.append(
        {
            "role": "user",
            "content": rng.choice(
                [
                    f"[{tag}] What do {a} and {b} cost together?",
                    f"[{tag}] How much is {a}?",
                    f"[{tag}] Price of {a} plus {b}, please.",
                    f"{tag}: find the price of {a}.",
                ]
            ),
        }
    )
    calls = [call("lookup", {"item": a})]
    if rng.random() < 0.25:
        calls.append(call("lookup", {"item": b}))
    for _turn in range(rng.choice([1, 2, 2, 3])):
        msgs.append(
            {"role": "assistant", "content": rng.choice(LEAD) if rng.random() < 0.3 else "", "tool_calls": calls}
        )
        for _ in calls:
            n = rng.randint(2, 60)
            msgs.append({"role": "tool", "content": rng.choice([str(n), json.dumps({"price": n}), f"{n} coins"])})
        calls = (
            [call("add", {"a": rng.randint(2, 60), "b": rng.randint(2, 60)})]
            if rng.random() < 0.6
            else [call("lookup", {"item": rng.choice(ITEMS)})]
        )
    msgs.append({"role": "assistant", "content": rng.choice(END) % rng.randint(2, 99)})
    return msgs


tok = Tokenizer(models.BPE())
tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tok.decoder = decoders.ByteLevel()
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
trainer = trainers.BpeTrainer(
    vocab_size=1500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
wrap = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
wrap.chat_template = TEMPLATE
corpus = [wrap.apply_chat_template(conversation(), tools=[vary(t) for t in TOOLS], tokenize=False) for _ in range(400)]
corpus += [
    "the quick brown fox jumps over the lazy dog and then some other words of plain English text appear in the system prompt"
] * 3
corpus = [
    c.replace("<|im_start|>", " ").replace("<|im_end|>", " ").replace("<tool_call>", " ").replace("</tool_call>", " ")
    for c in corpus
]
tok.train_from_iterator(corpus, trainer)
tok.add_tokens(
    [
        AddedToken("<tool_call>", normalized=False, special=False),
        AddedToken("</tool_call>", normalized=False, special=False),
    ]
)
t = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|endoftext|>")
t.chat_template = TEMPLATE
t.save_pretrained(OUT)

cfg = LlamaConfig(
    vocab_size=len(t),
    hidden_size=128,
    head_dim=64,
    intermediate_size=384,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=4096,
    eos_token_id=t.eos_token_id,
    bos_token_id=None,
    pad_token_id=t.pad_token_id,
    tie_word_embeddings=True,
)
m = LlamaForCausalLM(cfg)
print("vocab", len(t), "params", sum(p.numel() for p in m.parameters()))
START, EOS = t.convert_tokens_to_ids("<|im_start|>"), t.eos_token_id
ASSIST = t.encode("assistant\n", add_special_tokens=False)


def example():
    """Token ids of a conversation, and labels: what the assistant says, -100 elsewhere."""
    tools = [vary(t) for t in (TOOLS if rng.random() < 0.9 else rng.sample(TOOLS, 1))]
    if rng.random() < 0.2:
        tools.reverse()
    ids = t.encode(t.apply_chat_template(conversation(), tools=tools, tokenize=False), add_special_tokens=False)
    lab = [-100] * len(ids)
    i = 0
    while i < len(ids):
        if ids[i] == START and ids[i + 1 : i + 1 + len(ASSIST)] == ASSIST:
            i += 1 + len(ASSIST)
            while i < len(ids):
                lab[i] = ids[i]
                i += 1
                if ids[i - 1] == EOS:
                    break
        else:
            i += 1
    return ids, lab


opt = torch.optim.AdamW(m.parameters(), lr=3e-3)
for step in range(STEPS):
    for g in opt.param_groups:
        g["lr"] = 4e-3 * min(1, step / 30) * (1 - step / STEPS)
    ex = [example() for _ in range(12)]
    n = max(len(e[0]) for e in ex)
    x = torch.tensor([e[0] + [t.pad_token_id] * (n - len(e[0])) for e in ex])
    y = torch.tensor([e[1] + [-100] * (n - len(e[1])) for e in ex])
    att = torch.tensor([[1] * len(e[0]) + [0] * (n - len(e[0])) for e in ex])
    loss = m(input_ids=x, attention_mask=att, labels=y).loss
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    opt.step()
    if step % 25 == 0 or step == STEPS - 1:
        print(step, n, round(loss.item(), 3), flush=True)
m.to(torch.bfloat16).save_pretrained(OUT)
