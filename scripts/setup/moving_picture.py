"""Draws README's moving picture: one text, written without drafts and with them, as one run of each timed it.

    edge-export reference --widened --format onnx --no-verify --output my-bundle
    .venv/bin/python scripts/setup/moving_picture.py my-bundle docs/images/drafts.svg --machine "AMD EPYC (Zen 5), 2 cores"

The picture is an SVG that loops. Where a viewer plays no animation, it shows the end of both texts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import click

import edge_runtime
from edge_devices.command_line import one_sentence_errors
from edge_runtime.cli.demo import SAMPLING, TEXTS
from edge_runtime.text.channels import ChannelParser, Text

COLUMN_PX, LINE_PX, PANEL_PX, MARGIN_PX = 6.6, 15, 404, 12
PAUSE_S = 4.0
# Tokens of each run, and how many times as slow as the run the picture plays.
TOKENS, SLOWER = 72, 8
STYLE = """
svg { background: #0d1117; border-radius: 6px }
text { font: 11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre }
.prompt { fill: #8b949e } .accepted { fill: #3fb950; font-weight: bold } .head { fill: #ffffff; font-weight: bold }
"""


@dataclass(frozen=True)
class Piece:
    """The text of one token, the second at which it was there, and whether the token is an accepted draft."""

    text: str
    seconds: float
    accepted: bool


@dataclass(frozen=True)
class Panel:
    """One run: its heading, its pieces, and its tokens per second."""

    heading: str
    pieces: tuple[Piece, ...]
    speed: float


def recorded(session: edge_runtime.Session, prompt: str, *, draft_length: int | None, heading: str) -> Panel:
    """Runs the prompt and returns when each token came, counted from the first one."""
    generation = session.generate(prompt, max_tokens=TOKENS, draft_length=draft_length, sampling=SAMPLING)
    parser = ChannelParser(session.vocabulary, (), prompt=generation.prompt)
    pieces, begin = list[Piece](), None
    for done in generation.rounds():
        now = time.perf_counter()
        begin = begin or now
        for number, token in enumerate(done.tokens):
            text = "".join(event.text for event in parser.feed(token) if isinstance(event, Text))
            pieces.append(Piece(text, now - begin, number < done.accepted))
    return Panel(heading, tuple(pieces), generation.stats.tokens_per_second)


def placed(prompt: str, pieces: Iterable[Piece]) -> Iterator[tuple[str, int, int, Piece | None]]:
    """Yields each part without a line break with its column, its line, and its piece: None in the prompt."""
    column = line = 0
    for text, piece in ((prompt, None), *((piece.text, piece) for piece in pieces)):
        for number, part in enumerate(text.split("\n")):
            column, line = (0, line + 1) if number else (column, line)
            if part.strip():
                yield part.strip(" "), column + len(part) - len(part.lstrip(" ")), line, piece
            column += len(part)


def picture(prompt: str, panels: tuple[Panel, ...], caption: str) -> str:
    """Returns the SVG."""
    seconds = SLOWER * max(panel.pieces[-1].seconds for panel in panels) + PAUSE_S
    drawn, lines = list[str](), 0
    for number, panel in enumerate(panels):
        left = MARGIN_PX + number * PANEL_PX
        drawn.append(f'<text class="head" x="{left}" y="22">{escape(panel.heading)}</text>')
        for text, column, line, piece in placed(prompt, panel.pieces):
            lines = max(lines, line + 1)
            kind = "prompt" if piece is None else "accepted" if piece.accepted else ""
            place = f'x="{left + column * COLUMN_PX:.1f}" y="{46 + line * LINE_PX}" textLength="{len(text) * COLUMN_PX:.1f}"'
            waits = hidden(SLOWER * piece.seconds) if piece else ""
            drawn.append(f'<text class="{kind}" {place}>{escape(text)}{waits}</text>')
    below = 46 + lines * LINE_PX + 8
    for number, panel in enumerate(panels):
        end = hidden(SLOWER * panel.pieces[-1].seconds)
        drawn.append(f'<text class="head" x="{MARGIN_PX + number * PANEL_PX}" y="{below}">{panel.speed:.0f} tokens per second{end}</text>')
    drawn.append(f'<text class="prompt" x="{MARGIN_PX}" y="{below + 24}">{escape(caption)}</text>')
    width, height = 2 * MARGIN_PX + len(panels) * PANEL_PX, below + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
            f'<style>{STYLE}</style><rect width="{width}" height="{height}" rx="6" fill="#0d1117"/>',
            f'<g><animate id="loop" attributeName="class" from="" to="" dur="{seconds:.2f}s" begin="0s;loop.end"/></g>',
            *drawn,
            "</svg>\n",
        ]
    )


def hidden(seconds: float) -> str:
    """Returns what keeps an element hidden so long after the beginning of each loop; nothing for no time."""
    return f'<set attributeName="visibility" to="hidden" begin="loop.begin" dur="{seconds:.2f}s"/>' if seconds >= 0.01 else ""


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("output", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--machine", required=True, help="The processor, as the caption names it.")
@one_sentence_errors()
def main(bundle: Path, output: Path, machine: str) -> None:
    """Run BUNDLE without drafts and with them, and write OUTPUT."""
    prompt = TEXTS["code"]
    with edge_runtime.open_session(bundle, measure=True) as session:
        session.generate(prompt, max_tokens=TOKENS, sampling=SAMPLING).text()  # learns what drafts cost and bring, as every session does
        plain = recorded(session, prompt, draft_length=0, heading="Without drafts")
        drafted = recorded(session, prompt, draft_length=None, heading="With drafts: those that were accepted are green")
    if "".join(piece.text for piece in plain.pieces) != "".join(piece.text for piece in drafted.pieces):
        raise click.ClickException("both texts differ, which the picture would not show; run edge-run prove BUNDLE")
    caption = f"The demo model on {machine}. Both texts are the same. Played {SLOWER} times as slowly as it ran."
    output.write_text(picture(prompt, (plain, drafted), caption), "utf-8")
    click.echo(f"{output}: {output.stat().st_size / 1000:.0f} kB, {plain.speed:.1f} and {drafted.speed:.1f} tok/s")


if __name__ == "__main__":
    main()
