"""What a user may choose about the rows, as data."""

from dataclasses import dataclass
from typing import Final

from spanmill.errors import ConfigError

MERGES: Final = ("prefix", "none", "realign")
COUNTING_REWARDS: Final = frozenset({"", "reward", "final"})
"""Names of rewards that always count; every other name must be listed by the user."""


@dataclass(frozen=True, slots=True)
class Options:
    """Choices that change rows. Equal spans and equal options give equal rows."""

    merge: str = "prefix"
    """prefix, none or realign (design section 7)."""
    realign_tokens: int = 1024
    """The longest drift, in tokens, that `realign` accepts."""
    reward_names: frozenset[str] = frozenset()
    """Further reward names that count as rewards; any other name is a metric."""
    train_failed: bool = False
    """Keep the calls of failed rollouts trainable although no final reward judges them."""

    def __post_init__(self) -> None:
        if self.merge not in MERGES:
            raise ConfigError(f"merge: expected one of {', '.join(MERGES)}, got {self.merge!r}")
        if self.realign_tokens < 1:
            raise ConfigError(f"realign-tokens: expected a number of tokens >= 1, got {self.realign_tokens}")

    def counts(self, name: str) -> bool:
        """Whether a reward of this name is a reward, not a metric."""
        return name in COUNTING_REWARDS or name in self.reward_names


DEFAULTS: Final = Options()
"""What a user gets who chooses nothing."""
