"""The catalogue of metrics in docs/metrics.md is what the product has, no more and no less."""

import re
import time
from pathlib import Path
from types import MappingProxyType

from forebay_gateway.backend import Backend
from forebay_shared.settings import GatewaySettings
from forebay_shared.telemetry import (
    EngineMetrics,
    GrammarMetrics,
    UpstreamMetrics,
    WorkerMetrics,
)
from prometheus_client import CollectorRegistry

DOCS = Path(__file__).parent.parent.parent / "docs"
NAME = re.compile(r"`((?:forebay_|vllm:)\w+)(?:\{([\w,]+)\})?`")


TABLE = "forebay_usage"
"""Where an export writes to, which is no metric."""


class NoGrammars:
    waiting, outcomes, cache_size = 0, MappingProxyType({"compiled": 0}), (0, 0)


def product() -> dict[str, str]:
    """Families as a query names them, and their types."""
    registry = CollectorRegistry()
    engine = EngineMetrics(registry, model_name="m", engine="w", max_model_len=100)
    engine.cache_config(block_size=16)
    WorkerMetrics(registry, engine="w")
    registry.register(UpstreamMetrics("w", [], time.monotonic))
    registry.register(GrammarMetrics("w", NoGrammars()))
    backend = Backend(GatewaySettings())
    families = [*registry.collect(), *backend.telemetry.registry.collect()]
    return {f.name + "_total" * (f.type == "counter"): f.type for f in families}


async def test_the_catalogue_is_whole_and_holds_nothing_else() -> None:
    named = {name for name, _ in NAME.findall((DOCS / "metrics.md").read_text())}
    assert named == product().keys()


async def test_what_operators_are_told_to_look_at_is_there() -> None:
    suffixes = ("", "_count", "_sum", "_bucket")
    known = {name + end for name in product() for end in suffixes}
    for file in ("operations.md", "teams.md", "routing.md", "upstreams.md"):
        text = (DOCS / file).read_text()
        told = {name for name, _ in re.findall(r"`((?:forebay_|vllm:)\w+)(?:\{(.*?)\})?`", text)}
        assert told <= known | {TABLE}, (file, told - known)
