# pyright: basic, reportMissingImports=false
"""The rows of a learning run's first iteration in TRL's GRPOTrainer, for one step.

    python trl_step.py OUT          # what learn.py wrote; needs trl, datasets

`spanmill export --to trl-grpo` has the lists that a rollout_func returns. TRL's own measure of how far its
probabilities are from those of the sampler is printed, beside its loss.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
from datasets import Dataset
from learn import MAKE_MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import spanmill

MEASURES = ("loss", "grad_norm", "reward", "sampling_logp_difference", "importance_sampling_ratio")


def main() -> None:
    """One step, and what TRL says of it."""
    run = Path(sys.argv[1])
    with TemporaryDirectory() as folder:
        spanmill.export(run / "data", "trl-grpo", Path(folder) / "rows.parquet")
        rows = pl.read_parquet(Path(folder) / "rows.parquet")
        rows = rows.filter(pl.col("rollout_id").str.starts_with("step-0/")).sort("group_id", "rollout_id", "episode")
        plays = rows.height // rows["group_id"].n_unique()
        model = Path(folder) / "model"
        subprocess.run([sys.executable, str(MAKE_MODEL), str(model)], check=True, capture_output=True)
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model),
            processing_class=AutoTokenizer.from_pretrained(model),
            reward_funcs=lambda reward, **_: reward,
            train_dataset=Dataset.from_dict({"prompt": [str(group) for group in rows["group_id"].unique()]}),
            rollout_func=lambda prompts, trainer: rows.drop("rollout_id", "episode", "task_id", "group_id").to_dict(
                as_series=False
            ),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=rows.height,
                num_generations=plays,
                max_steps=1,
                logging_steps=1,
                use_cpu=True,
                bf16=False,
                report_to=[],
                save_strategy="no",
                vllm_importance_sampling_correction=True,
                disable_tqdm=True,
            ),
        )
        # TRL compares with the sampler only if it runs vLLM itself; these weights are the sampler's already.
        trainer.use_vllm, trainer._last_loaded_step = True, 0
        trainer.train()
        found = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
        shown = {name: value for name, value in found.items() if any(measure in name for measure in MEASURES)}
        print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
