"""Snapshots of one process's metrics, and the one valid exposition of many.

A snapshot is what a process publishes on Redis. It knows no metric by name.
"""

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest


class _Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class _Family(msgspec.Struct, frozen=True, array_like=True):
    name: str
    text: str
    type: str
    samples: list[_Sample]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Family]).decode


def snapshot(registry: CollectorRegistry) -> bytes:
    """All metrics of one process, for `render` in another."""
    return _encode(
        [
            _Family(
                family.name,
                family.documentation,
                family.type,
                [
                    _Sample(sample.name, dict(sample.labels), sample.value)
                    for sample in family.samples
                    if not sample.name.endswith("_created")
                ],
            )
            for family in registry.collect()
        ]
    )


def render(snapshots: Iterable[tuple[dict[str, str], bytes]]) -> str:
    """One exposition of many processes' snapshots, each with labels to tell it from the others.

    Families of one name are grouped; a snapshot that cannot be read, and a family whose type
    differs from the first seen, are left out: one foreign process must not spoil the scrape.
    """
    families: dict[str, Metric] = {}
    for labels, data in snapshots:
        try:
            decoded = _decode(data)
        except msgspec.DecodeError:
            continue
        for family in decoded:
            metric = families.setdefault(family.name, Metric(family.name, family.text, family.type))
            if metric.type != family.type:
                continue
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels | labels, sample.value)
    return generate_latest(_Collected(families.values())).decode()


class _Collected(CollectorRegistry):
    """Families that are collected already, in the shape that the library renders."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
