"""One iteration's agents: each task is played several times at once, and each play is a rollout.

    python agents.py MODEL_SERVER STEP TASKS PLAYS

Prints a line of JSON per rollout, with its reward. Whatever is sampled is recorded by the plugin in the model server;
the agent itself only says which rollout a request is of, in its headers.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

import spanmill

WORDS = ("apples", "rivers", "clocks", "engines", "letters", "gardens", "numbers", "harbours")
ANSWER_TOKENS = 16


def reward_of(answer: str) -> float:
    """The share of an answer's characters that are lower-case letters: what is to be learned, checked by its text."""
    return sum(character.islower() and character.isascii() for character in answer) / max(len(answer), 1)


def play(server: str, step: str, task: int, number: int, plays: int) -> tuple[str, float]:
    """A conversation of two turns; (rollout id, mean reward of its answers)."""
    word = WORDS[task % len(WORDS)]
    questions = (f"say something about {word}", "say more")
    messages: list[dict[str, str]] = []
    answers: list[str] = []
    with spanmill.rollout(
        f"{step}/{word}-{task}/{number}",
        group_id=f"{step}/{word}-{task}",
        task_id=f"{word}-{task}",
        group_size=plays,
        base_url=f"{server}/v1",
    ) as rollout:
        client = OpenAI(base_url=f"{server}/v1", api_key="EMPTY", default_headers=rollout.headers, max_retries=0)
        for question in questions:
            messages.append({"role": "user", "content": question})
            answer = client.chat.completions.create(
                model="policy", messages=messages, temperature=1.0, max_tokens=ANSWER_TOKENS
            )
            answers.append(answer.choices[0].message.content or "")
            messages.append({"role": "assistant", "content": answers[-1]})
    return rollout.id, sum(map(reward_of, answers)) / len(answers)


def main() -> None:
    """Play all tasks and print what each rollout was worth."""
    server, step, tasks, plays = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with ThreadPoolExecutor(16) as pool:
        played = [
            pool.submit(play, server, step, task, number, plays) for task in range(tasks) for number in range(plays)
        ]
        for done in played:
            rollout_id, value = done.result()
            print(json.dumps({"rollout_id": rollout_id, "value": value}))
    if not spanmill.flush():
        raise SystemExit("the collector did not take all spans")


if __name__ == "__main__":
    main()
