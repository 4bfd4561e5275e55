"""Runs the clients' scripts against three servers and reads what each scenario came to."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from clients import environments
from clients.catalog import ALONE, CLIENTS
from serve_house import Serve

SCRIPTS = Path(__file__).parent / "scripts"
AT_ONCE = 3
_SCRIPT_TIMEOUT_S = 1200

Results = dict[tuple[str, str], str]
"""By client and scenario: empty when it went well, else what went wrong."""


class Servers(NamedTuple):
    """One with real models, to chat and to embed; one that echoes, takes two requests and thinks;
    one whose model a script plays, which calls what it is told to."""

    model: Serve
    echo: Serve
    scripted: Serve


def run(servers: Servers, wanted: Mapping[str, set[str]]) -> Results:
    """Every wanted scenario: several clients at once, then one by one what must be alone."""
    variables = {
        **os.environ,
        "CLIENTS_URL": servers.model.url,
        "CLIENTS_KEY": servers.model.key,
        "CLIENTS_MODEL": servers.model.model,
        "CLIENTS_ECHO_URL": servers.echo.url,
        "CLIENTS_ECHO_KEY": servers.echo.key,
        "CLIENTS_SCRIPTED_URL": servers.scripted.url,
        "CLIENTS_SCRIPTED_KEY": servers.scripted.key,
        "CLIENTS_EMBEDDING_MODEL": "all-minilm-l6-v2",
    }
    results: Results = {}

    def run_one(name: str, scenarios: set[str]) -> None:
        if scenarios:
            outcome = _run_script(name, sorted(scenarios), variables)
            results.update({(name, scenario): said for scenario, said in outcome.items()})

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run_one, wanted, [names - ALONE for names in wanted.values()]))
    for name, scenarios in wanted.items():
        run_one(name, scenarios & ALONE)
    return results


def _run_script(name: str, scenarios: Iterable[str], variables: dict[str, str]) -> dict[str, str]:
    client = CLIENTS[name]
    command = environments.command(client.environment, SCRIPTS / client.script)
    process = subprocess.Popen(
        [*command, *scenarios],
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=_SCRIPT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    outcome = dict.fromkeys(scenarios, f"the script ended before it came to this: {err[-2000:]}")
    for line in out.splitlines():
        said = json.loads(line)
        outcome[said["scenario"]] = said["error"]
    return outcome
