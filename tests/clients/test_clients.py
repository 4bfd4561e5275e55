"""SDKs that people use, each in an environment of its own, against real servers.

`make test-clients` builds the environments and runs this. Each scenario of each client is one
test; see `catalog.py` for the list and `scripts/` for what they check.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import environments, runner
from clients.catalog import CLIENTS
from serve_house import starting

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]

SCRIPTED = (
    "--engine", "echo", "--chat-template", str(Path(__file__).parent / "scripted.jinja"),
    "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
)  # fmt: skip
CASES = [(name, scenario) for name, client in CLIENTS.items() for scenario in client.scenarios]


@pytest.fixture(scope="session")
def servers() -> Iterator[runner.Servers]:
    narrow = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--echo-delay-ms", "10")
    with starting() as start:
        model = start("--embedding-model", "minilm")
        echo = start("--engine", "echo", "--reasoning-parser", "qwen3", *narrow)
        scripted = start(*SCRIPTED, "--served-model-name", "scripted")
        yield runner.Servers(model.wait_ready(), echo.wait_ready(), scripted.wait_ready())


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, servers: runner.Servers) -> runner.Results:
    """What came of every scenario that this session selected and whose environment is there."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for item in request.session.items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        name = parameters.get("client")
        if name is not None and environments.is_built(CLIENTS[name].environment):
            wanted[name].add(parameters["scenario"])
    return runner.run(servers, wanted)


@pytest.mark.parametrize(("client", "scenario"), CASES)
def test_a_client(client: str, scenario: str, results: runner.Results) -> None:
    environment = CLIENTS[client].environment
    if not environments.is_built(environment):
        pytest.skip(f"the environment {environment} is not built: make test-clients")
    failure = results[client, scenario]
    if failure:
        pytest.fail(failure, pytrace=False)
