"""pytest's side: `--engine`, `--engine-setting`, and the `driven` engine that the tests share."""

from collections.abc import Generator
from typing import Any

import pytest
from forebay_shared.flags import options
from forebay_shared.settings import WorkerSettings

from forebay_worker.conformance.driver import Driven
from forebay_worker.engines.registry import load_engine

LAST = "test_stop"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forebay", "conformance of an engine")
    group.addoption(
        "--engine",
        default=None,
        metavar="PKG:NAME",
        help="callable of WorkerSettings that makes the engine, or the name of an installed one",
    )
    group.addoption(
        "--engine-setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a field of WorkerSettings; repeatable",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The engine is made once, so the test that ends it comes last, in whatever order the rest."""
    items.sort(key=lambda item: item.path.parent.name == "conformance" and item.path.stem == LAST)


@pytest.fixture(scope="session")
def driven(request: pytest.FixtureRequest) -> Generator[Driven]:
    """The engine under test, started; its card says what it can do."""
    name: str | None = request.config.getoption("--engine")
    if name is None:
        pytest.skip("--engine names the engine to test")
    known = {option.name: option for option in options(WorkerSettings)}
    settings: dict[str, Any] = {}
    words: list[str] = request.config.getoption("--engine-setting") or []
    for word in words:
        field, _, text = word.partition("=")
        if field not in known:
            raise pytest.UsageError(f"--engine-setting: WorkerSettings has no field {field!r}")
        value = known[field].convert(text, f"--engine-setting {field}")
        settings[field] = (value,) if known[field].repeatable else value
    engine = Driven(load_engine(name)(WorkerSettings(**settings)))
    yield engine
    engine.stop()
