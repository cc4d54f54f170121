"""Prometheus' text exposition format, version 0.0.4 (prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a metric; `suffix` is _sum or _count of a summary."""

    value: float
    labels: Mapping[str, str]
    suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric with its samples; `description` is its help text."""

    name: str
    kind: Literal["counter", "gauge", "summary"]
    description: str
    samples: Sequence[Point]


def counter(name: str, description: str, value: float) -> Metric:
    """A counter without labels."""
    return Metric(name=name, kind="counter", description=description, samples=[Point(value=value, labels={})])


def exposition(metrics: Sequence[Metric]) -> str:
    """Returns the text of a scrape, ending in a newline. A metric without samples is left out."""
    lines = []
    for metric in metrics:
        if metric.samples:
            lines += [f"# HELP {metric.name} {_escaped(metric.description)}", f"# TYPE {metric.name} {metric.kind}"]
            lines += [f"{metric.name}{sample.suffix}{_labels(sample.labels)} {sample.value!r}" for sample in metric.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value, quoted=True)}"' for name, value in labels.items()) + "}"


def _escaped(text: str, *, quoted: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quoted else text
