# pyright: basic, reportMissingImports=false
"""GRPO in plain torch: rows of `episodes` and the rewards in them become an update of the weights."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import polars as pl
import torch
from transformers import AutoModelForCausalLM

from spanmill.torch import EpisodeDataset, TokenBatches, pad

CLIP = 0.2
BATCH_TOKENS = 16384


class Ratios(NamedTuple):
    """How far the trainer's probabilities of the sampled tokens are from those recorded, before any update."""

    tokens: int
    mean: float
    """Of exp(logprob here - logprob recorded)."""
    mean_deviation: float
    """Mean of the absolute difference from 1."""
    max_deviation: float
    shifted_deviation: float
    """The control: the mean difference if each logprob had been recorded one token too late."""


def advantages(episodes: pl.DataFrame) -> pl.DataFrame:
    """The episodes with an `advantage`: the rollout's reward against those of its group.

    Mean and deviation are taken over rollouts, not over rows: a rollout of many rows must not weigh more than one of
    few. Rollouts without a reward are left out.
    """
    rollouts = episodes.filter(pl.col("reward").is_not_null()).unique(["rollout_id", "attempt"], maintain_order=True)
    mean, deviation = pl.col("reward").mean().over("group_id"), pl.col("reward").std().over("group_id")
    worth = rollouts.select("rollout_id", "attempt", advantage=(pl.col("reward") - mean) / (deviation + 1e-6))
    return episodes.drop("advantage").join(worth, on=["rollout_id", "attempt"], maintain_order="left")


class Learner:
    """The policy being trained: float32 weights, computed with in bfloat16, as the model server does."""

    def __init__(self, model: Path, learning_rate: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self._model.train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=learning_rate, weight_decay=0.0)

    def save(self, folder: Path) -> None:
        """Write the weights as the model server loads them."""
        state = {name: weight.to(torch.bfloat16) for name, weight in self._model.state_dict().items()}
        self._model.save_pretrained(folder, state_dict=state)

    def logprobs(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(B, L-1): of each token what the policy gives it now; batches are shifted."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        chosen = batch["labels"].clamp(min=0)[..., None]
        return logits.float().log_softmax(-1).gather(-1, chosen)[..., 0]

    @torch.no_grad()
    def ratios(self, episodes: pl.DataFrame) -> Ratios:
        """The importance ratios of all trained tokens."""
        found, shifted = [], []
        for batch in batches(episodes):
            mask, recorded, now = batch["loss_mask"], batch["logprobs"], self.logprobs(batch)
            found.append((now - recorded)[mask].exp())
            shifted.append((now[:, 1:] - recorded[:, :-1])[mask[:, 1:] & mask[:, :-1]].exp())
        ratio = torch.cat(found)
        away, control = (ratio - 1).abs(), (torch.cat(shifted) - 1).abs()
        return Ratios(len(ratio), ratio.mean().item(), away.mean().item(), away.max().item(), control.mean().item())

    def update(self, episodes: pl.DataFrame, epochs: int, report: Callable[[str], None] = print) -> None:
        """`epochs` steps on all episodes: clipped policy gradient, every rollout weighed the same."""
        rollouts = episodes.n_unique(["rollout_id", "attempt"])
        for epoch in range(epochs):
            self._optimizer.zero_grad()
            total = 0.0
            for batch in batches(episodes):
                mask = batch["loss_mask"]
                # Zeroed off the mask before exp: what stands there is no logprob.
                ratio = torch.where(mask, self.logprobs(batch) - batch["logprobs"], 0.0).exp()
                advantage = batch["advantage"][:, None]
                gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
                per_token = mask / batch["rollout_tokens_trained"][:, None]
                loss = -(gain * per_token).sum() / rollouts
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            report(f"    epoch {epoch}: loss {total:+.4f}")


def batches(episodes: pl.DataFrame):
    """Padded batches of all episodes, shifted: element t is about token t + 1."""
    dataset = EpisodeDataset(episodes)
    for rows in TokenBatches(dataset.lengths, BATCH_TOKENS):
        yield pad(dataset.__getitems__(rows), align="shifted")
