"""The learning run as an SVG: reward and importance ratio by iteration."""

from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT, LEFT, TOP, GAP = 560, 150, 70, 30, 60


class Iteration(NamedTuple):
    """Figures of one iteration, taken before its update."""

    iteration: int
    reward: float
    """Mean over rollouts."""
    tokens: int
    """Trained tokens."""
    ratio: float
    """Mean of torch's probability over vLLM's, of the sampled tokens."""
    mean_deviation: float
    max_deviation: float
    """Of that ratio from 1."""
    shifted_deviation: float
    """The control: the mean deviation if each logprob had been recorded one token too late."""

    def said(self) -> str:
        """A line of the log."""
        return (
            f"step {self.iteration}: reward {self.reward:.3f}; ratio of {self.tokens} tokens: mean {self.ratio:.5f},"
            f" |ratio - 1| mean {self.mean_deviation:.5f} max {self.max_deviation:.4f}"
            f" (shifted by one token: {self.shifted_deviation:.3f})"
        )


def draw(history: Sequence[Iteration]) -> str:
    """Two panels, one above the other."""
    panels = [
        _panel(0, "mean reward (share of lower-case letters)", [one.reward for one in history], 0.0, 1.0),
        _panel(1, "mean importance ratio before the update", [one.ratio for one in history], 0.95, 1.05),
    ]
    size = f'width="{WIDTH + LEFT + 30}" height="{TOP + 2 * (HEIGHT + GAP)}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([start, f'<rect {size} fill="white"/>', "".join(panels) + "</svg>", ""])


def _panel(place: int, title: str, values: Sequence[float], low: float, high: float) -> str:
    top = TOP + place * (HEIGHT + GAP)
    step = WIDTH / max(len(values) - 1, 1)

    def y(value: float) -> float:
        return top + HEIGHT * (high - min(max(value, low), high)) / (high - low)

    lines = [f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>\n']
    for part in range(5):
        value = low + (high - low) * part / 4
        lines.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>\n')
        lines.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>\n')
    points = [(LEFT + step * number, y(value)) for number, value in enumerate(values)]
    path = " ".join(f"{x:.1f},{at:.1f}" for x, at in points)
    lines.append(f'<polyline points="{path}" fill="none" stroke="#1f6feb" stroke-width="2"/>\n')
    for number, (x, at) in enumerate(points):
        lines.append(f'<circle cx="{x:.1f}" cy="{at:.1f}" r="3" fill="#1f6feb"/>\n')
        lines.append(f'<text x="{x:.1f}" y="{top + HEIGHT + 18}" text-anchor="middle">{number}</text>\n')
    return "".join(lines)
