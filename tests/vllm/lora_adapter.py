# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Makes a LoRA adapter, random and strong, for the model that tiny_model.py makes.

usage: lora_adapter.py OUT_DIR
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

out, rank = Path(sys.argv[1]), 8
torch.manual_seed(1)
weights = {
    f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.randn(*shape)
    for layer in range(2)
    for part, shape in (("A", (rank, 128)), ("B", (128, rank)))
}
save_file(weights, out / "adapter_model.safetensors")
config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
(out / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "base_model_name_or_path": "tiny"}))
