# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Make a tiny random Llama with its own tokenizer and chat template, for running real vLLM on a CPU.

usage: tiny_model.py OUT_DIR        (needs torch, transformers, tokenizers; takes seconds, 230 KB)

head_dim must be one that vLLM's CPU attention supports: 64 works, 16 does not.
"""

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

out = sys.argv[1]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=512,
    special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
)
tokenizer.train_from_iterator(["hello world the quick brown fox jumps over the lazy dog "] * 20, trainer)
fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
fast.chat_template = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
fast.save_pretrained(out)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(fast),
    hidden_size=128,
    head_dim=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=4096,
    eos_token_id=fast.eos_token_id,
    bos_token_id=None,
    pad_token_id=fast.pad_token_id,
)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
