"""What a target is: a name, a pure function from rows to rows, and how the result lies on disk."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from spanmill.triplets.select import Need

Write = Callable[[Any], None]
"""Takes an Arrow table of the target's rows."""


class Fill(NamedTuple):
    """What is written where a format must have a number that was not recorded; None: such rows are left out."""

    reward: float | None = None
    temperature: float | None = None
    policy_version: int | None = None
    pad_token_id: int = 0
    """Padding of token ids in tensors; masks say where it stands."""


class Target(NamedTuple):
    """A format that a trainer reads."""

    name: str
    about: str
    """For whom it is and what lies at PATH."""
    convert: Callable[[Any, Fill], Any]
    """Arrow rows to Arrow rows, of whole rollouts (groups, if it reads those); what it gets depends on `reads`."""
    sink: Callable[[Path, Fill], AbstractContextManager[Write]]
    reads: Literal["episodes", "calls", "tasks", "groups"] = "episodes"
    """Rows of `episodes`, or of `triplets` once for each Episode that the call stands in, in the order of its turns.

    Also one rollout's calls for each task, or the first Episode of each rollout, in whole groups. More columns come
    with them: `status`; `uid`, the group or, without one, the rollout; `group_index` and `rollout_index`, whole numbers
    in the order of the dataset; `repetition`, the rollout's number in its group; `last_episode`. Calls have `episode`,
    `step`, `trained`, `trained_tokens`, `final_reward`, `group_size` and `rollout_metadata`, too.
    """
    needs: frozenset[Need] = frozenset()
    exact: bool = True
    """Whether it carries token ids: then models are not mixed and sequences may be cut."""
    logprobs: bool = True
    """Whether it carries logprobs: then their modes are not mixed."""
    optional_logprobs: str | None = None
    """The column of logprobs that may be left out, where the trainer can do without."""
