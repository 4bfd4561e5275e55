"""What a process that runs within a test has counted."""

from prometheus_client import CollectorRegistry


def total(registry: CollectorRegistry, name: str, **labels: str) -> float:
    """The sum over the series of `name` that have these labels, as a scrape would show them; 0
    without any."""
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
