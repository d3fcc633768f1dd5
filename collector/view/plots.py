"""Plots as SVG, drawn on the server. Their colours are those of the page's stylesheet: pygal's own are left out."""

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from xml.etree.ElementTree import SubElement, tostring

import pygal  # pyright: ignore[reportMissingTypeStubs]
from markupsafe import Markup

from spanmill.collector.view.text import visible

# pygal hangs an importer of its plugins, which are not used, into this process; Python warns of such old ones.
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "pygal"]


def _label(value: float) -> str:
    """A number at an axis or of a bar."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


_HEIGHT: Final = 240
_WIDTH: Final = 560
_OPTIONS: Final[Mapping[str, Any]] = {
    "css": [],
    "js": [],
    "show_legend": False,
    "disable_xml_declaration": True,
    "explicit_size": False,
    "width": _WIDTH,
    "height": _HEIGHT,
    "margin": 4,
    "margin_left": 24,
    "margin_right": 24,
    "truncate_label": -1,
    "formatter": _label,
    "x_label_rotation": 0,
    "show_x_guides": False,
    "pretty_print": False,
}


def bars(title: str, bins: Sequence[tuple[float, float, int]]) -> Markup | None:
    """A histogram of (from, to, how many); None without values."""
    if not bins:
        return None
    chart: Any = pygal.Bar(**_OPTIONS, spacing=0, margin_bottom=8, x_labels_major_count=6, show_minor_x_labels=False)
    chart.x_labels = [f"{low:.4g}" for low, _, _ in bins]
    chart.add(title, [{"value": count, "label": f"{low:.4g} to {high:.4g}"} for low, high, count in bins])
    return _rendered(chart, title)


def rewards_over_time(points: Sequence[tuple[int, float, int]]) -> Markup | None:
    """Mean rewards of (start in microseconds, mean, rollouts) in order; None without any."""
    if not points:
        return None
    chart: Any = pygal.Line(**_OPTIONS, x_labels_major_count=5, show_minor_x_labels=False, dots_size=2.5)
    chart.x_labels = [_time(start, points[-1][0] - points[0][0]) for start, _, _ in points]
    chart.add("mean reward", [{"value": mean, "label": f"{count} rollouts"} for _, mean, count in points])
    return _rendered(chart, "mean reward over time")


def rewards_by_version(points: Sequence[tuple[str, int, float]]) -> Markup | None:
    """Mean rewards of (policy version, rollouts, mean) in order; None without any. The last 40 versions are shown."""
    if not points:
        return None
    chart: Any = pygal.Line(**_OPTIONS, x_labels_major_count=8, show_minor_x_labels=False, dots_size=3)
    chart.x_labels = [visible(version[:20]) for version, _, _ in points[-40:]]
    chart.add("mean reward", [{"value": mean, "label": f"{count} rollouts"} for _, count, mean in points[-40:]])
    return _rendered(chart, "mean reward by policy version")


def group_rewards(rewards: Sequence[tuple[str, float | None]]) -> Markup | None:
    """The reward of each rollout of a group, side by side; None where none has one."""
    if all(reward is None for _, reward in rewards):
        return None
    chart: Any = pygal.Bar(**_OPTIONS, spacing=4)
    chart.x_labels = [str(number) for number in range(len(rewards))]
    chart.add("reward", [{"value": reward, "label": visible(name)} for name, reward in rewards])
    return _rendered(chart, "rewards of the group")


def _time(microseconds: int, whole: int) -> str:
    """As much of a time as tells the points of a plot apart."""
    shown = datetime.fromtimestamp(microseconds / 1e6, UTC)
    return f"{shown:%m-%d %H:%M}" if whole > 86_400_000_000 else f"{shown:%H:%M:%S}"


def _rendered(chart: Any, title: str) -> Markup:
    """The drawing alone: without pygal's script, whose tooltips become titles, and without its style."""
    root: Any = chart.render_tree()
    for parent in list(root.iter()):
        for child in list(parent):
            pygals_own = child.tag == "title" and child.text == "Pygal"
            if child.tag in ("script", "style", "defs") or "tooltip-overlay" in child.get("class", "") or pygals_own:
                parent.remove(child)
    for mark in list(root.iter()):
        told = [child for child in mark if child.tag == "desc"]
        for child in told:
            mark.remove(child)
        words = [child.text for child in told if child.get("class") in ("value", "label") and child.text]
        if words:
            SubElement(mark, "title").text = ": ".join(words)
    root.attrib.pop("id", None)  # made at random
    root.set("role", "img")
    root.set("aria-label", title)
    return Markup(tostring(root, "unicode"))  # which escapes every text
