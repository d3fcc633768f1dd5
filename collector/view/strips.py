"""An Episode, or a call, as a strip of tokens: what each is, whether it is trained, how likely it was."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from spanmill.errors import ConfigError

FOLD: Final = 24
"""Tokens shown at each end of a stretch that is folded."""
ANSWER: Final = 400
"""Answers up to twice this are shown whole."""
WINDOW: Final = 4096
"""Tokens on a page that folds nothing."""
_LEVELS: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Borders, in nats of surprise, between the shades of a token."""

TextOf = Callable[[int], str]


@dataclass(frozen=True)
class Token:
    """One token of a strip."""

    position: int
    id: int
    text: str | None
    """None without a tokenizer."""
    logprob: float | None
    """None where it was not sampled, or not recorded."""
    level: int | None
    """0 certain to 6 surprising; None without a logprob."""


@dataclass(frozen=True)
class Stretch:
    """Tokens that belong together: what stood before an answer, or an answer."""

    kind: str
    """context, trained, or untrained: sampled, but in no loss here."""
    turn: int
    call_id: str | None
    start: int
    end: int
    tokens: Sequence[Token]
    """Those that are shown; the folded ones lie after the first half of them."""
    hidden: int
    version: str | None
    reward: float | None

    @property
    def head(self) -> Sequence[Token]:
        """Those before the fold."""
        return self.tokens[:FOLD] if self.hidden else self.tokens

    @property
    def tail(self) -> Sequence[Token]:
        """Those after it."""
        return self.tokens[FOLD:] if self.hidden else ()


def load_tokenizer(path: Path) -> TextOf:
    """Token id -> text, of a `tokenizer.json` or the folder that holds one; nothing is ever downloaded.

    A token that is no whole character, half an emoji say, comes in the tokenizer's own spelling. Raises ConfigError.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigError("--tokenizer needs a package that is not installed: pip install tokenizers") from error
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer {path}: expected a tokenizer.json, or a folder with one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"--tokenizer {file} cannot be read: {error}") from error

    def text_of(token: int) -> str:
        text = tokenizer.decode([token], skip_special_tokens=False)
        spelled = tokenizer.id_to_token(token)
        if spelled is None:
            return f"<{token}>"
        return spelled if not text or "�" in text else text

    return text_of


def episode_strip(
    episode: Mapping[str, Any], text_of: TextOf | None, window: tuple[int, int] | None = None
) -> Iterator[Stretch]:
    """The stretches of an Episode in order: folded, or those of a window [from, to) with nothing folded."""
    position = 0
    versions = episode["policy_versions"]
    for number, turn in enumerate(episode["turns"]):
        start, end = turn["prompt_end"], turn["response_end"]
        kind = "trained" if turn["trained"] and any(episode["loss_mask"][start:end]) else "untrained"
        version = next((v["version"] for v in versions if v["start"] < end and v["start"] + v["length"] > start), None)
        reward = episode["step_rewards"][number] if number < len(episode["step_rewards"]) else None
        for what, a, b in (("context", position, start), (kind, start, end)):
            answer = what != "context"
            made = _stretch(episode, text_of, what, (a, b), window)
            if made is not None:
                tokens, hidden, first, last = made
                told = (turn["call_id"], version, reward) if answer else (None, None, None)
                yield Stretch(what, number, told[0], first, last, tokens, hidden, told[1], told[2])
        position = end


def call_strip(call: Mapping[str, Any], text_of: TextOf | None) -> list[Stretch]:
    """Prompt and answer of one call, what of them was recorded."""
    made: list[Stretch] = []
    prompt, response = call["prompt_token_ids"], call["response_token_ids"]
    offset = 0 if prompt is None else len(prompt)
    for what, ids, probs, at in (("context", prompt, None, 0), ("answer", response, call["response_logprobs"], offset)):
        if ids is None or not len(ids):
            continue
        kind = what if what == "context" else "trained" if call["trainable"] else "untrained"
        shown, hidden = _folded(range(len(ids)), FOLD if what == "context" else ANSWER)
        tokens = [_token(at + n, ids[n], None if probs is None else probs[n], text_of) for n in shown]
        call_id = None if what == "context" else call["call_id"]
        version = None if what == "context" else call["policy_version"]
        made.append(Stretch(kind, call["turn"], call_id, at, at + len(ids), tokens, hidden, version, None))
    return made


def _stretch(
    episode: Mapping[str, Any],
    text_of: TextOf | None,
    kind: str,
    bounds: tuple[int, int],
    window: tuple[int, int] | None,
) -> tuple[list[Token], int, int, int] | None:
    """(tokens, how many are folded, from, to) of a stretch; None where the window has none of it."""
    first, last = bounds
    if window is not None:
        first, last = max(first, window[0]), min(last, window[1])
    if first >= last:
        return None
    shown, hidden = (range(first, last), 0)
    if window is None:
        shown, hidden = _folded(range(first, last), FOLD if kind == "context" else ANSWER)
    ids, probs, mask = episode["input_ids"], episode["logprobs"], episode["loss_mask"]
    tokens = [_token(n, ids[n], probs[n] if mask[n] and probs is not None else None, text_of) for n in shown]
    return tokens, hidden, first, last


def _folded(positions: range, whole: int) -> tuple[Sequence[int], int]:
    """Positions to show, and how many in the middle are not."""
    if len(positions) <= 2 * whole or len(positions) <= 2 * FOLD + 1:
        return positions, 0
    return [*positions[:FOLD], *positions[-FOLD:]], len(positions) - 2 * FOLD


def _token(position: int, token: Any, logprob: Any, text_of: TextOf | None) -> Token:
    number = None if logprob is None else float(logprob)
    level = None if number is None else sum(-number > border for border in _LEVELS)
    return Token(position, int(token), text_of(int(token)) if text_of else None, number, level)
