"""Adapters on a real server, as vLLM's users ask for them: in every dialect, for teams, on the
books."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from forebay_shared.settings import Secret
from patience import PATIENCE_S
from serve_house import Admin, Serve, starting, until

pytestmark = pytest.mark.system

TEAMS = {
    "models": [{"id": "loud", "price": {"input": 1.0, "output": 2.0}}, {"id": "gone"}],
    "aliases": [{"id": "fast", "targets": [{"model": "gone"}], "fallbacks": ["loud"]}],
    "organisations": [
        {
            "id": "acme",
            "teams": [{"id": "red", "models": ["loud", "fast"], "keys": [{"name": "app"}]}],
        }
    ],
}
MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, Admin, str]]:
    data = tmp_path_factory.mktemp("d")
    with starting() as start:
        modules = ["--lora-modules", "loud=/srv/adapters/loud-v2", "bold=/srv/adapters/bold"]
        server = start("--engine", "echo", "--enable-lora", *modules, data=data).wait_ready()
        assert server.model == "echo", "what is printed is the model, not an adapter"
        admin = Admin(server, Secret((data / "admin-key").read_text().strip()))
        made = admin.call("POST", "apply", TEAMS)
        yield server, admin, made["tokens"]["key/red/app"]


def client(server: Serve, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    base = server.url.removesuffix("/v1")
    return httpx.Client(base_url=base, headers=headers, timeout=PATIENCE_S)


def test_adapters_are_listed_and_answer_by_name(built: tuple[Serve, Admin, str]) -> None:
    server = built[0]
    sdk = server.client()
    models = {model.id: model.to_dict() for model in sdk.models.list()}
    assert set(models) == {"echo", "loud", "bold", "fast"}
    assert (models["loud"]["parent"], models["loud"]["root"]) == ("echo", "loud-v2")
    assert "parent" not in models["echo"]
    assert "/srv" not in str(models)
    for model, text in (("echo", "hello there"), ("loud", "HELLO THERE"), ("bold", "HELLO THERE")):
        answer = sdk.chat.completions.create(model=model, messages=MESSAGES)
        assert (answer.model, answer.choices[0].message.content) == (model, text)
    with client(server, server.key) as http:
        body = {"model": "loud", "max_tokens": 40, "messages": MESSAGES}
        assert http.post("/v1/messages", json=body).json()["content"][0]["text"] == "HELLO THERE"
        body = {"model": "loud", "input": "hello there"}
        assert "HELLO THERE" in http.post("/v1/responses", json=body).text
        assert http.post("/v1/embeddings", json=body).status_code == 400
        assert http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
        unknown = http.post("/v1/completions", json={"model": "quiet", "prompt": "a"})
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"


def test_a_team_pays_for_the_adapter_by_its_name(built: tuple[Serve, Admin, str]) -> None:
    server, admin, key = built
    with client(server, key) as http:
        listed = http.get("/v1/models").json()["data"]
        assert {one["id"]: one.get("parent") for one in listed} == {"loud": None, "fast": None}
        for model, status in (("loud", 200), ("fast", 200), ("bold", 404), ("echo", 404)):
            asked = {"model": model, "prompt": "abc", "max_tokens": 3}
            assert http.post("/v1/completions", json=asked).status_code == status, model

    def booked() -> dict[str, int]:
        return {row["model"]: row["requests"] for row in admin.usage(by="model", team="red")}

    until(lambda: booked() == {"loud": 2})


def test_who_sees_only_an_adapter_counts_tokens_without_naming_it(
    built: tuple[Serve, Admin, str],
) -> None:
    server, _, key = built
    with client(server, key) as team, client(server, server.key) as operator:
        for path, body in (
            ("/tokenize", {"prompt": "hello"}),
            ("/tokenize", {"messages": MESSAGES}),
            ("/detokenize", {"tokens": [104, 105]}),
        ):
            mine, all_ = team.post(path, json=body), operator.post(path, json=body)
            assert (mine.status_code, mine.json()) == (200, all_.json())


def test_what_cannot_be_ends_in_one_line(tmp_path: Path) -> None:
    for words, said in (
        (["--lora-modules", "a=/b", "--enable-lora", "--engine", "http"], "serves no adapters"),
        (["--lora-modules", "a=/b", "--engine", "echo"], "needs --enable-lora"),
    ):
        command = [sys.executable, "-m", "forebay_shared.cli", "worker", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
