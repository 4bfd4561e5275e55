"""The whole product over a real Redis Cluster: streams, vectors, kept responses, teams' limits."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from forebay_shared.settings import Secret
from patience import PATIENCE_S
from redis_fleet import cluster_running
from serve_house import Admin, Serve, starting, until

pytestmark = [pytest.mark.system, pytest.mark.chaos]

TEAMS = {
    "organisations": [
        {
            "id": "acme",
            "teams": [
                {"id": "red", "limits": {"requests_per_minute": 2}, "keys": [{"name": "app"}]},
                {"id": "blue", "keys": [{"name": "app"}]},
            ],
        }
    ]
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Serve]:
    """Two gateways and an echo worker whose Redis is a cluster of three nodes."""
    with cluster_running() as cluster, starting() as start:
        yield start(
            "--engine", "echo", "--gateways", "2", "--redis-url", cluster.url, data=home
        ).wait_ready()


def test_streams_vectors_and_kept_responses(server: Serve) -> None:
    with server.client() as client:
        stream = client.completions.create(
            model=server.model, prompt="abc", max_tokens=30, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == "abc" * 10
        assert len(client.embeddings.create(model=server.model, input=["a", "b"]).data) == 2
        made = client.responses.create(model=server.model, input="hello", max_output_tokens=5)
        assert client.responses.retrieve(made.id).output_text == made.output_text
        client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        run = client.responses.create(
            model=server.model, input="hello", max_output_tokens=5, background=True
        )
        until(lambda: client.responses.retrieve(run.id).status in ("completed", "incomplete"))


def test_teams_are_bounded_and_counted(server: Serve, home: Path) -> None:
    admin_key = Secret((home / "admin-key").read_text().strip())
    admin = Admin(server, admin_key)
    made = admin.call("POST", "apply", TEAMS)
    tokens = {label.removeprefix("key/"): token for label, token in made["tokens"].items()}
    red, blue = (_client(server, tokens[f"{team}/app"]) for team in ("red", "blue"))
    with red, blue:
        for _ in range(2):
            _ask(server, red)
        with pytest.raises(openai.RateLimitError) as refused:
            _ask(server, red)
        assert int(refused.value.response.headers["retry-after"]) <= 60
        _ask(server, blue)
    until(lambda: sum(row["requests"] for row in admin.usage()) == 3)


def _client(server: Serve, token: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=token, max_retries=0, timeout=PATIENCE_S)


def _ask(server: Serve, client: openai.OpenAI) -> None:
    client.completions.create(model=server.model, prompt="ab", max_tokens=2)
