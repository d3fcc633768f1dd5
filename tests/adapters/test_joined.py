"""One call, several spans: whose numbers the row gets."""

from typing import Any

import numpy as np
import pytest
from agent_spans import call, rollout

from spanmill.adapters import adapt
from spanmill.triplets.records import Triplet, Value

DAMAGED: dict[str, list[Any]] = {
    "texts": ["1", "2"],
    "truth values": [True, 2],
    "fractions": [1.5, 2.0],
    "negative": [-1, -5],
    "too large": [2**31, 2],
    "holes": [1, None],
}


def only_call(engine_attributes: dict[str, Value]) -> Triplet:
    """The one call of two spans: the client's without prompt ids, the engine's without answer ids."""
    client = call(2, None, [5, 6], parent=1)
    engine = call(3, None, None, response_id="r2", capture="engine", parent=2, attributes=engine_attributes)
    (made,) = adapt([rollout(1, "r"), client, engine]).rollouts
    (found,) = made.triplets
    return found


@pytest.mark.parametrize("ids", DAMAGED.values(), ids=list(DAMAGED))
def test_damaged_prompt_ids_of_another_span_are_not_taken(ids: list[Any]) -> None:
    """What stands for ids that cannot be used never gets into a row: the prompt is unknown, the call not trained."""
    found = only_call({"spanmill.prompt.token_ids": ids})
    assert found.prompt_token_ids is None
    assert (False, ["no_prompt_ids"]) == (found.trainable, sorted(found.flags))


def test_sound_prompt_ids_of_another_span_are_taken() -> None:
    """The client's answer ids and the engine's prompt ids make one row."""
    found = only_call({"spanmill.prompt.token_ids": np.array([1, 2])})
    assert found.prompt_token_ids is not None
    assert ([1, 2], True) == (found.prompt_token_ids.tolist(), found.trainable)
