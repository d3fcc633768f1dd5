import math

import numpy as np
import pytest

from spanmill.adapters.values import logprobs, token_ids


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e-5, -1e300])
def test_what_is_no_log_probability_is_a_fault(value: float) -> None:
    """NaN, infinities, values above the noise, and what float32 would turn into an infinity never become numbers."""
    read = logprobs(np.array([-0.5, value]), "p")
    assert ("nonfinite_logprob", f"p[1] is {value}") == read.fault


def test_the_floor_and_the_noise_are_legal() -> None:
    """The floor of vLLM, -9999.0, and a hair above zero are kept as they are."""
    read = logprobs(np.array([-9999.0, 9e-6]), "p")
    assert ([-9999.0, float(np.float32(9e-6))], None) == (np.asarray(read.values).tolist(), read.fault)


@pytest.mark.parametrize(("ids", "at"), [([1, -1], 1), ([2**31], 0), ([-(2**63)], 0), ([5, 2**40, 3], 1)])
def test_ids_outside_their_range_have_one_reason(ids: list[int], at: int) -> None:
    """Every id outside [0, 2^31) is a bad token id, and how many ids there were is still known."""
    read = token_ids(np.array(ids, np.int64), "ids")
    assert (("bad_token_id", f"ids[{at}] is {ids[at]}"), len(ids)) == (
        read.fault,
        read.ids.size if read.ids is not None else 0,
    )
