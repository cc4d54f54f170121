"""Draws plots as SVG that takes its text colour from the page, so that it can be read in dark and in light. The only module that imports matplotlib."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from edge_runtime.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stands for the page's text colour; no colour of a series is this one.
INK = "#010203"
# After Okabe and Ito's colours for all kinds of colour vision, made to stand out (3 : 1) on white and on near black alike.
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
    """One plot: its name, a sentence that says what it shows, and the SVG element."""

    name: str
    title: str
    svg: str


def require_library() -> None:
    """Raises RequestError if the plotting library is missing: before anything is measured for it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise RequestError("the HTML report needs matplotlib; install it: pip install 'edge-mtp[report]'")


def draw_svg(name: str, title: str, draw: Callable[[Axes], None]) -> Plot:
    """Returns what `draw` puts on the axes it gets. Raises RequestError if the plotting library is missing."""
    require_library()
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
    """Makes a page's element of a file: the page's text colour, ids of its own, a name for those who cannot see it."""
    svg = svg.replace(INK, "currentColor")
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", svg, count=1)
    svg = re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


@contextmanager
def legend(axes: Axes) -> Iterator[None]:
    """Adds a legend beside the axes if what was drawn inside has more than one label."""
    yield
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def label_text(label: str) -> str:
    """A label as it is: matplotlib takes $ for mathematics and a leading underscore for a label not to be shown."""
    return label.replace("$", r"\$").replace("_", "\u200a_", 1) if label.startswith("_") else label.replace("$", r"\$")
