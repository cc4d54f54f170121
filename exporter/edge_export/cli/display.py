"""The output of `edge-export`: progress bars, the table of the bundle's files, and the figures of the comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import click
from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from edge_devices.errors import byte_text
from edge_devices.files.typed_json import to_json
from edge_devices.waiting import Report
from edge_runtime.bundle.bundle import Bundle, exported_quality


class Amount(ProgressColumn):
    """A column with bytes done, speed and time left. It is empty for a step that does not count bytes."""

    def render(self, task: Task) -> Text:
        """Returns e.g. "1.2 GB of 3.4 GB, 210.0 MB/s, ETA 11 s"."""
        if not task.fields["counted"]:
            return Text("")
        parts = [f"{byte_text(int(task.completed))} of {byte_text(int(task.total or 0))}"]
        if not task.finished and task.speed:
            parts.append(f"{byte_text(int(task.speed))}/s")
        if not task.finished and task.time_remaining is not None:
            parts.append(f"ETA {task.time_remaining:.0f} s")
        return Text(", ".join(parts))


class Display:
    """A `Progress` that shows an export on standard error, with a bar per step that has bytes, speed and time left."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(TextColumn("{task.description}"), BarColumn(bar_width=12), TimeElapsedColumn(), Amount(), console=console)
        self._task: TaskID | None = None

    def step(self, title: str, total_bytes: int | None) -> None:
        """Ends the current bar and starts the next. Without a total, the bar only pulses."""
        self._finish()
        self._task = self._bars.add_task(title, total=total_bytes, counted=total_bytes is not None)

    def advance(self, done_bytes: int) -> None:
        if self._task is not None:
            self._bars.advance(self._task, done_bytes)

    def note(self, sentence: str) -> None:
        """Prints a message above the bars."""
        self._bars.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        try:
            self._bars.start()
        except RuntimeError as error:  # no memory for the stack of its thread
            raise MemoryError from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._finish()
        self._bars.stop()

    def _finish(self) -> None:
        """Sets a finished step's total to the bytes that were done, because totals are estimates."""
        if self._task is not None:
            task = next(task for task in self._bars.tasks if task.id == self._task)
            self._bars.update(self._task, total=max(task.completed, 1), completed=max(task.completed, 1))


class Steps:
    """Shows the steps of a package on standard error: on a terminal a bar with the time, else a line for each step and each tenth."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = TextColumn("{task.description}", markup=False), BarColumn(bar_width=12), TimeElapsedColumn()
        self._bars = Bars(*columns, console=console, transient=True) if console.is_terminal else None

    def __call__(self, title: str) -> Report:
        """Begins a step. Returns a function to report the step's progress."""
        if self._bars is None:
            self.note(title)
            return self._tenths(title)
        bars = self._bars
        for task in bars.tasks:
            bars.remove_task(task.id)
        begun = bars.add_task(title, total=None)
        return lambda share, _="": bars.update(begun, total=1.0, completed=share)

    def _tenths(self, title: str) -> Report:
        shown = 0

        def report(share: float, _: str = "") -> None:
            nonlocal shown
            if int(share * 10) > shown:
                shown = int(share * 10)
                self.note(f"{title}: {shown * 10} %")

        return report

    def note(self, sentence: str) -> None:
        """Prints a message above the bar."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()


def summary(bundle: Bundle) -> Table:
    """Returns a table of the bundle's files with their sizes."""
    table = Table(title=f"{bundle.folder}: Gemma 4 {bundle.manifest.architecture.family}", title_justify="left")
    for column, justify in (("file", "left"), ("role", "left"), ("weights", "left"), ("size", "right")):
        table.add_column(column, justify="right" if justify == "right" else "left", overflow="fold", no_wrap=column in ("file", "size"))
    for entry in bundle.manifest.files:
        table.add_row(entry.path, entry.role, entry.weights, byte_text(entry.bytes))
    table.add_section()
    table.add_row("total", "", "", byte_text(sum(entry.bytes for entry in bundle.manifest.files)))
    return table


def size_table(title: str, column: str, sizes: Sequence[tuple[str, int]]) -> Table:
    """Returns a table of names with their sizes, and the total."""
    table = Table(title=title, title_justify="left")
    table.add_column(column, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for name, size in sizes:
        table.add_row(Text(name), byte_text(size))  # a name may contain text that looks like rich's markup
    table.add_section()
    table.add_row("total", byte_text(sum(size for _, size in sizes)))
    return table


def parity_sentences(parity: dict[str, Any] | None) -> list[str]:
    """Returns a sentence for each format's comparison with the reference."""
    gguf = {key: value for key, value in (parity or {}).items() if key != "onnx"}
    onnx = (parity or {}).get("onnx")
    sentences = [parity_sentence(gguf)] if gguf or onnx is None else []
    return sentences + ([f"ONNX: {parity_sentence(onnx)}"] if onnx is not None else [])


def parity_sentence(parity: dict[str, Any]) -> str:
    """Returns a sentence about a comparison with the reference."""
    if not parity or "skipped" in parity:
        return f"Parity not measured: {parity.get('skipped', 'no reason given')}."
    plain, drafts, quality = parity["unquantized"], parity["drafts"], exported_quality(parity)
    assert quality is not None  # an export that measures parity also measures quality
    return (
        f"Parity with {parity['reference']}: unquantized logits within {plain['max_abs_difference']:.3g}, "
        f"drafts agree {drafts['unquantized_agreement']:.0%} ({drafts['quantized_agreement']:.0%} quantized)."
        f" On {quality.rows} tokens of English, code and chat {parity['quantized']['quantization']} {quality.words}."
        + calibration_sentence(parity["quality"])
        + media_sentence(parity.get("media"))
    )


def calibration_sentence(figures: dict[str, Any]) -> str:
    """Returns a sentence, after a space, about the gain by the calibration; empty if there was none."""
    before = figures.get("mean_kl_uncalibrated")
    return "" if before is None else f" The calibration brought mean KL from {before:.3g} to {figures['mean_kl']:.3g}."


def media_sentence(figures: dict[str, Any] | None) -> str:
    """Returns a sentence, after a space, about the encoders' soft rows; empty if there are no encoders."""
    kinds = [f"{figures[f'{kind}_rows']:.2g} of {kind}s" for kind in ("image", "sound") if f"{kind}_rows" in figures] if figures else []
    return (
        f" Encoders ({figures['quantization']}) differ from the reference by {' and '.join(kinds)}, as a share of the norm."
        if figures
        else ""
    )


def show(bundle: Bundle, console: Console, as_json: bool) -> None:
    """Prints the bundle's files and its comparison with the reference."""
    if as_json:
        click.echo(json.dumps({"bundle": str(bundle.folder), **to_json(bundle.manifest)}, ensure_ascii=False))
        return
    Console().print(summary(bundle))
    for sentence in parity_sentences(bundle.manifest.parity):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
