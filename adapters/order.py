"""The order of a rollout's turns (design sections 7 and 15): tokens decide, clocks only where tokens do not."""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

from spanmill.adapters.joined import Joined


def number_turns(calls: Sequence[Joined], before: Mapping[int, list[Joined]]) -> list[Joined]:
    """Give every call its turn and return the calls in the order (turn, choice).

    A call comes after every call whose tokens its prompt extends; `before` holds those by the Python id of the call.
    Among calls with no unplaced one before them the next is the lowest (client span start, span id). The choices of one
    request are one turn.
    """
    requests: dict[int, list[Joined]] = defaultdict(list)
    for call in calls:
        requests[id(call.request)].append(call)
    waiting: dict[int, set[int]] = {}
    after: dict[int, set[int]] = defaultdict(set)
    for key, choices in requests.items():
        waiting[key] = {id(b.request) for c in choices for b in before.get(id(c), ())} - {key}
        for other in waiting[key]:
            after[other].add(key)
    start = {key: min(c.start_key for c in choices) for key, choices in requests.items()}
    ready = [(start[key], key) for key, earlier in waiting.items() if not earlier]
    heapq.heapify(ready)
    placed: list[Joined] = []
    turn = 0
    while len(placed) < len(calls):
        if not ready:
            # Two prompts of one completions request may each wait for the other's turn: the earliest goes first.
            key = min((k for k, earlier in waiting.items() if earlier), key=lambda k: start[k])
            waiting[key] = set()
            ready.append((start[key], key))
        _, key = heapq.heappop(ready)
        for call in sorted(requests[key], key=lambda c: c.choice):
            call.turn = turn
            placed.append(call)
        turn += 1
        for other in after[key]:
            if key in waiting[other]:
                waiting[other].discard(key)
                if not waiting[other]:
                    heapq.heappush(ready, (start[other], other))
    return placed
