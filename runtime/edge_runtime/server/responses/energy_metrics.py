"""Energy of a server's requests as Prometheus metrics."""

from __future__ import annotations

from edge_devices.energy.live import RunEnergy
from edge_runtime.session.monitoring.prometheus import Metric, Sample


def energy_metrics(total: RunEnergy) -> list[Metric]:
    """Returns what is known of all requests together; the info metric has the kind (measured, estimate, none), and why there is no figure.

    Joules are the machine's while requests ran, idle power included.
    """
    facts = total.facts
    labels = {"meter": facts.name, "scope": str(facts.scope)} if facts else {}
    info = {"kind": total.kind, **labels, "reason": total.sentence() if total.kind == "none" else ""}
    metrics = [Metric(name="edge_mtp_energy_info", kind="gauge", description="The energy figure.", samples=[Sample(value=1, labels=info)])]
    figures = (
        ("edge_mtp_energy_joules", "Joules while requests ran, idle power included.", total.joules),
        ("edge_mtp_energy_joules_per_token", "Joules per emitted token of all requests.", total.joules_per_token),
    )
    for name, description, interval in figures:
        if interval is not None:
            every = (("value", interval.value), ("low", interval.low), ("high", interval.high))
            samples = [Sample(value=value, labels={**labels, "bound": bound}) for bound, value in every]
            metrics.append(Metric(name=name, kind="gauge", description=description, samples=samples))
    return metrics
