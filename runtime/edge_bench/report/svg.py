"""Draws plots as SVG in the page's text colour, readable in dark and light mode. The only module that imports matplotlib."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from edge_devices.files.user_cache import cache_folder
from edge_runtime.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Placeholder for the page's text colour; no series uses it.
INK = "#010203"
# Okabe and Ito's colours for colour-blind readers, adjusted to a contrast of 3 : 1 on both white and near black.
COLOURS = ("#0072b2", "#c47f00", "#009e73", "#cc79a7", "#d55e00", "#3c95cf", "#8c8c8c", "#978800")
LINES = ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx")
MARKERS = "os^Dv<>P"
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.labelcolor": INK,
    "legend.frameon": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.transparent": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One plot: its name, its title and the SVG element."""

    name: str
    title: str
    svg: str


def require_library() -> None:
    """Raises RequestError if the plotting library is missing. Called before the measurement."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("the HTML report needs matplotlib; install it with: pip install 'edge-mtp[report]'")


def draw_svg(name: str, title: str, draw: Callable[[Axes], None]) -> Plot:
    """Returns the plot that `draw` makes on its axes. Raises RequestError if the plotting library is missing."""
    require_library()
    os.environ.setdefault("MPLCONFIGDIR", str(cache_folder() / "matplotlib"))  # its list of fonts, which is read when it is imported
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(8.5, 4.6), layout="constrained")
        draw(figure.add_subplot())
        with io.StringIO() as file:
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            text = file.getvalue()
    return Plot(name=name, title=title, svg=_inline(text[text.index("<svg") :], name, title))


def _inline(svg: str, name: str, title: str) -> str:
    """Converts an SVG file to an inline element: the page's text colour, unique ids, and a label for screen readers."""
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


@contextmanager
def legend(axes: Axes) -> Iterator[None]:
    """Adds a legend beside the axes if more than one labelled series is drawn within the context."""
    yield
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def stacked_bars(axes: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    """Draws a bar for each label from top to bottom: the parts one after the other, by name, with a width for each label."""
    left = [0.0] * len(labels)
    with legend(axes):
        for number, (name, widths) in enumerate(parts.items()):
            axes.barh(range(len(labels)), widths, left=left, label=label_text(name), color=COLOURS[number % len(COLOURS)])
            left = [start + width for start, width in zip(left, widths, strict=True)]
    name_rows(axes, labels)


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Names the rows of horizontal bars, the first on top."""
    axes.set_yticks(range(len(labels)), [label_text(label) for label in labels])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def label_text(label: str) -> str:
    """Escapes a label: matplotlib interprets $ as mathematics and hides labels with a leading underscore."""
    return label.replace("$", r"\$").replace("_", "\u200a_", 1) if label.startswith("_") else label.replace("$", r"\$")
