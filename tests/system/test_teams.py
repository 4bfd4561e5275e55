"""Teams on a real server: the guide's way from nothing to three teams, and who may do what."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from forebay_gateway.admin.client import AdminClient
from forebay_gateway.api.admin.routes import route_table
from forebay_shared.settings import Secret, StartError
from issuer_house import Signer
from patience import PATIENCE_S
from redis_house import redis_running
from serve_house import Admin, Serve, since_yesterday, starting, until

pytestmark = pytest.mark.system

DOCUMENT = """\
models:
  - id: echo
    price: {input: 1.0, cached_input: 0.1, output: 2.0}
organisations:
  - id: acme
    budgets: [{amount: 100, window: month, time_zone: Europe/Berlin}]
    keys: [{name: boss, role: owner}]
    teams:
      - id: red
        models: [echo]
        limits: {requests_per_minute: 1000, tokens_per_minute: 100000}
        users: [{id: ann, role: admin}, {id: bob}]
        keys:
          - {name: app}
          - {name: ann, user: ann, role: admin}
          - {name: bob, user: bob, role: member}
          - {name: eye, role: viewer}
      - id: blue
        models: [other]
        keys: [{name: app, expires: 2099-12-31}]
  - id: umbrella
    teams:
      - id: green
        limits: {requests_per_minute: 2}
        keys: [{name: app}]
      - id: grey
        limits: {requests_per_minute: 3, concurrent_requests: 1}
        keys: [{name: app}]
issuers:
  - id: corp
    issuer: https://login.example.com/
    audiences: [forebay]
    jwks: JWKS
    user_claim: email
    grants:
      - {claim: role, value: viewer, team: red, role: viewer}
      - {claim: role, value: member, team: red, role: member}
      - {claim: role, value: admin, team: red, role: admin}
      - {claim: role, value: owner, organisation: acme, role: owner}
      - {claim: role, value: root, role: owner}
"""
SIGNER, FORGER = Signer("corp"), Signer("corp")


class House:
    """One server with its teams. `tokens` are by team and name."""

    def __init__(self, server: Serve, data: Path) -> None:
        self.server = server
        self.data = data
        self.base = server.url.removesuffix("/v1")
        self.file = data / "teams.yaml"
        (data / "jwks.json").write_text(json.dumps({"keys": [SIGNER.jwk]}))
        self.document = DOCUMENT.replace("JWKS", str(data / "jwks.json"))
        self.file.write_text(self.document)
        self.admin = Admin(server, Secret((data / "admin-key").read_text().strip()))
        self.tokens: dict[str, str] = {}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`forebay admin`, as a user types it; what it changes is on both gateways then."""
        command = [sys.executable, "-m", "forebay_shared.cli", "admin"]
        where = ["--url", self.base, "--data-dir", str(self.data)]
        done = subprocess.run(
            [*command, *where, *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        self.server.mirrored()
        return done

    def secrets(self) -> list[str]:
        """Of each token, the part that nobody may see: a key's secret, a JWT's signature."""
        return [
            token.split("-")[3] if token.startswith("sk-fb-") else token.split(".")[2]
            for token in self.tokens.values()
        ]

    def client(self, name: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.server.url, api_key=self.tokens[name], max_retries=0, timeout=PATIENCE_S
        )

    def http(self, name: str) -> httpx.Client:
        key = self.tokens.get(name, name)
        return httpx.Client(
            base_url=self.base, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    data = tmp_path_factory.mktemp("d")
    with starting() as start:
        server = start("--engine", "echo", "--gateways", "2", data=data).wait_ready()
        house = House(server, data)
        dry = house.run("apply", str(house.file), "--dry-run")
        assert "create  team/red" in dry.stdout, dry.stderr
        made = house.run("apply", str(house.file))
        for line in made.stdout.splitlines():
            name, _, token = line.partition("  sk-fb-")
            if token:
                house.tokens[name] = "sk-fb-" + token
        assert len(house.tokens) == 8, made
        for role in ("viewer", "member", "admin", "owner", "root", "unmapped"):
            house.tokens[f"token/{role}"] = SIGNER.token(role=role, email=USERS.get(role, ""))
        house.tokens["token/nobody"] = FORGER.token(role="root")
        yield house


@pytest.fixture
def house(built: House) -> House:
    """What the last test changed is on both gateways."""
    built.server.mirrored()
    return built


def ask(client: openai.OpenAI, **fields: object) -> str:
    answer = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "hello there"}], max_tokens=5, **fields
    )
    return answer.choices[0].message.content or ""


def test_a_document_is_applied_once_and_exported_as_it_was(house: House) -> None:
    applied = house.run("apply", str(house.file))
    assert (applied.stdout, applied.stderr) == ("nothing to change\n", "")
    exported = house.run("export").stdout
    again = house.data / "again.yaml"
    again.write_text(exported)
    assert house.run("apply", str(again), "--prune").stdout == "nothing to change\n"
    assert "sk-fb" not in exported
    assert "digest" not in exported
    bad = house.data / "bad.yaml"
    bad.write_text(house.document.replace("requests_per_minute: 2", "requests_per_minuet: 2"))
    refused = house.run("apply", str(bad))
    assert refused.returncode == 2
    assert "organisations[1].teams[0].limits.requests_per_minuet" in refused.stderr


def test_a_team_sees_its_models_and_is_held_to_its_limits(house: House) -> None:
    red, blue, green = (house.client(f"{team}/app") for team in ("red", "blue", "green"))
    assert ask(red)
    assert [model.id for model in red.models.list()] == ["echo"]
    assert not list(blue.models.list())
    with pytest.raises(openai.NotFoundError):
        ask(blue)
    assert ask(green)
    assert ask(green)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(green)
    headers = caught.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 60
    assert headers["x-ratelimit-limit-requests"] == "2"
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert "The team green" in str(caught.value)
    # 2,000 tokens take 1.2 s to come back: the answer is there before.
    raw = red.completions.with_raw_response.create(model="echo", prompt="hi", max_tokens=2_000)
    assert raw.headers["x-ratelimit-limit-tokens"] == "100000"
    assert int(raw.headers["x-ratelimit-remaining-tokens"]) < 100_000


ASKS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": "there"},
    "/v1/rerank": {"query": "hi", "documents": ["there"]},
}
FIGURES = [f"{f}-{of}" for of in ("requests", "tokens") for f in ("limit", "remaining", "reset")]


def told(answer: httpx.Response) -> list[str]:
    """The values of `x-ratelimit-*`, of requests and then of tokens."""
    return [answer.headers[f"x-ratelimit-{name}"] for name in FIGURES]


@pytest.mark.parametrize("path", ASKS)
def test_every_answer_says_what_is_left(house: House, path: str) -> None:
    limits = {"requests_per_minute": 500, "tokens_per_minute": 9_000}
    team = {"organisation": "umbrella", "limits": limits}
    house.admin.call("PUT", "teams/lime", team)
    made = house.admin.call("POST", "keys", {"team": "lime", "name": path})
    full = ["500", "500", "0s", "9000", "9000", "0s"]
    body = {"model": "echo", **ASKS[path]}
    with house.http(made["token"]) as http:
        for answer in (
            http.get("/v1/models"),
            http.get("/v1/models/none"),
            http.get("/nothing/here"),
            http.put(path, json=body),
            http.post(path, content=b"{"),
            http.post(path, json={}),
            http.post(path, json={**body, "model": "none"}),
            http.post(path, json={**body, "model": ["echo"]}),
            http.post("/tokenize", json={"model": "echo", "prompt": "hi"}),
        ):
            assert told(answer) == full, (answer.request.method, answer.url, answer.text)
        streams = path in list(ASKS)[:4]
        for stream in (False, True) if streams else (False,):
            answer = http.post(path, json={**body, "stream": stream} if streams else body)
            assert answer.status_code == 200, answer.text
            limit, left, reset, *tokens = told(answer)
            assert (limit, tokens[0]) == ("500", "9000")
            assert int(left) < 500
            assert int(tokens[1]) < 9_000
            assert float(reset.removesuffix("s")) > 0
    house.admin.call("DELETE", f"keys/{made['id']}")


@pytest.mark.parametrize("scope", ["key", "user", "team", "organisation", "model"])
def test_a_refusal_says_what_is_left_whichever_scope_refused(house: House, scope: str) -> None:
    narrow, wide = {"requests_per_minute": 1}, {"requests_per_minute": 7}
    kinds = ("key", "user", "team", "organisation")
    limits = {kind: narrow if kind == scope else wide for kind in kinds}
    body = {"model": "echo", "prompt": "hi", "max_tokens": 1}
    tree = {"price": {"input": 1.0, "cached_input": 0.1, "output": 2.0}}
    org, team, user = f"o-{scope}", f"t-{scope}", f"u-{scope}"
    house.admin.call("PUT", f"organisations/{org}", {"limits": limits["organisation"]})
    house.admin.call("PUT", f"teams/{team}", {"organisation": org, "limits": limits["team"]})
    house.admin.call("PUT", f"users/{user}", {"team": team, "limits": limits["user"]})
    key = {"team": team, "user": user, "name": scope, "limits": limits["key"]}
    made = house.admin.call("POST", "keys", key)
    try:
        if scope == "model":
            house.admin.call("PUT", "models/echo", {**tree, "limits": narrow})
        with house.http(made["token"]) as http:
            answers = [http.post("/v1/completions", json=body) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 429]
            assert f"The {scope} " in answers[1].json()["error"]["message"]
            for answer in answers:
                assert answer.headers["x-ratelimit-limit-requests"] == "1"
                assert answer.headers["x-ratelimit-remaining-requests"] == "0"
                reset_s = float(answer.headers["x-ratelimit-reset-requests"].removesuffix("s"))
                assert 0 < reset_s <= 60
    finally:
        house.admin.call("PUT", "models/echo", tree)
        for place in (f"keys/{made['id']}", f"users/{user}", f"teams/{team}"):
            house.admin.call("DELETE", place)
        house.admin.call("DELETE", f"organisations/{org}")


def test_limits_hold_for_what_runs_in_the_background_and_are_asked_at_once(house: House) -> None:
    grey = house.client("grey/app")

    def begin() -> str:
        return grey.responses.create(model="echo", input="hello there", background=True).id

    for _ in range(3):
        made = begin()
        until(lambda made=made: grey.responses.retrieve(made).status == "completed")
    with pytest.raises(openai.RateLimitError) as caught:
        begin()
    assert "The team grey" in str(caught.value)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60

    def booked() -> bool:
        shown = house.admin.usage(by="team", team="grey")
        return [row["requests"] for row in shown] == [3]

    until(booked)


def test_usage_is_on_the_books_with_its_cost(house: House) -> None:
    def booked() -> int:
        shown = house.admin.usage(by="team,model", team="red")
        return sum(row["output_tokens"] for row in shown)

    before = booked()
    ask(house.client("red/app"), stream=False)
    until(lambda: booked() >= before + 5)
    with house.http("red/app") as http:
        query = {"by": "team", "from": since_yesterday()}
        [row] = http.get("/v1/usage", params=query).json()["data"]
    assert row["team"] == "red"
    assert row["output_tokens"] >= 5
    fresh = row["input_tokens"] - row["cached_tokens"]
    cost = fresh * 1e-6 + row["cached_tokens"] * 1e-7 + row["output_tokens"] * 2e-6
    assert float(row["cost"]) == pytest.approx(cost)
    table = house.run("usage", "--team", "red", "--by", "day,key", "--format", "csv").stdout
    assert table.startswith("day,key,requests,failed,input_tokens,")
    records = list(house.admin.pages("records"))
    teams = {record["team"] for record in records}
    assert "red" in teams
    assert not teams & {"", "blue"}, "blue may ask for no model that is served"


def test_a_rotated_key_fails_no_request_and_a_deleted_one_ends_everywhere(house: House) -> None:
    made = house.run("keys", "create", "--team", "red", "--name", "turning")
    old = made.stdout.strip()
    key_id = old.split("-")[2]
    new = house.run("keys", "rotate", key_id).stdout.strip()
    for token in (old, new):
        with house.http(token) as http:
            assert all(http.get("/v1/models").status_code == 200 for _ in range(6))
    assert house.run("keys", "rotate", key_id, "--grace-hours", "0").returncode == 0
    for _ in range(6):
        with house.http(old) as http:  # of either gateway
            assert http.get("/v1/models").status_code == 401
    house.run("keys", "disable", key_id)
    assert house.run("keys", "delete", key_id).stdout == f"deleted {key_id}\n"
    with house.http(new) as http:
        assert http.get("/v1/models").status_code == 401


def test_a_change_says_what_it_had_read(house: House) -> None:
    with house.http(str(house.admin._key)) as http:
        seen = http.get("/admin/v1/teams/blue")
        tag = seen.headers["etag"]
        body = {**seen.json(), "name": "Blue"}
        changed = http.put("/admin/v1/teams/blue", json=body, headers={"if-match": tag})
        assert changed.status_code == 200
        stale = http.put("/admin/v1/teams/blue", json=body, headers={"if-match": tag})
        assert stale.status_code == 412
        twice = http.put("/admin/v1/teams/blue", json=body, headers={"if-none-match": "*"})
        assert twice.status_code == 412
        below = http.delete("/admin/v1/teams/blue")
        assert below.status_code == 409
        any_ = http.put("/admin/v1/teams/blue", json=body, headers={"if-match": "*"})
        assert any_.status_code == 200
        newest = any_.headers["etag"]
        of_list = {"if-match": f"{tag}, {newest}"}
        assert http.put("/admin/v1/teams/blue", json=body, headers=of_list).status_code == 200
        weak = {"if-match": f"W/{http.get('/admin/v1/teams/blue').headers['etag']}"}
        assert http.put("/admin/v1/teams/blue", json=body, headers=weak).status_code == 412
        for method in ("PUT", "DELETE"):
            bare = {"if-match": tag.strip('"')}
            bad = http.request(method, "/admin/v1/teams/blue", json=body, headers=bare)
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "If-Match")
        back = http.put("/admin/v1/teams/blue", json=seen.json())
        assert back.status_code == 200
        page = http.get("/admin/v1/keys", params={"limit": 2}).json()
        assert len(page["data"]) == 2
        assert page["next"]
        for path in ("usage?by=colour", "usage?from=soon", "audit?after=x", "keys?limit=-1"):
            assert http.get(f"/admin/v1/{path}").status_code == 400, path


def test_a_key_of_the_command_line_has_its_own_bounds(house: House) -> None:
    words = ["keys", "create", "--team", "red", "--name", "narrow", "--route", "completions"]
    words += ["--limit", "requests_per_minute=1", "--expires", "2099-12-31"]
    made = house.run(*words)
    token = made.stdout.strip()
    body = {"model": "echo", "prompt": "hi", "max_tokens": 1}
    with house.http(token) as http:
        assert http.get("/v1/models").status_code == 403
        answers = [http.post("/v1/completions", json=body).status_code for _ in range(2)]
        assert answers == [200, 429]
    key = house.admin.call("GET", f"keys/{token.split('-')[2]}")
    assert key["expires"] == 4_102_358_400.0
    house.run("keys", "delete", key["id"])
    for flag, value in (("--limit", "requests_per_minute"), ("--expires", "soon")):
        refused = house.run("keys", "create", "--team", "red", "--name", "x", flag, value)
        assert (refused.returncode, flag in refused.stderr) == (2, True)
    unknown = house.run("keys", "create", "--team", "red", "--name", "x", "--limit", "speed=1")
    assert "limits.speed" in unknown.stderr


def test_the_admin_api_describes_what_each_route_takes(house: House) -> None:
    with house.http("red/eye") as http:
        described = http.get("/admin/v1/openapi.json").json()
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            names = {each["name"] for each in operation.get("parameters", [])}
            assert ("id" in names) == ("If-Match" in names) == ("{id}" in path)
            assert ("requestBody" in operation) == (method in ("put", "post")), (method, path)
    key = described["paths"]["/admin/v1/keys"]["post"]["requestBody"]["content"]
    fields = key["application/json"]["schema"]["properties"]
    assert {"team", "networks", "expires", "limits"} <= set(fields)
    assert not {"id", "secrets", "created"} & set(fields)
    schemas = set(described["components"]["schemas"])
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described))) <= schemas


def test_what_does_not_exist_matches_nothing(house: House) -> None:
    with house.http(str(house.admin._key)) as http:
        path, body = "/admin/v1/teams/lilac", {"organisation": "acme"}
        for tags in ("*", '"1"', '"1", "2"', '"not-ours"'):
            missing = http.put(path, json=body, headers={"if-match": tags})
            assert (missing.status_code, missing.json()["error"]["code"]) == (
                412,
                "precondition_failed",
            ), tags
        assert http.get(path).status_code == 404, "nothing was made"
        assert http.delete(path, headers={"if-match": "*"}).status_code == 404
        made = http.put(path, json=body, headers={"if-none-match": "*"})
        assert made.status_code == 200
        assert http.put(path, json=body, headers={"if-none-match": "*"}).status_code == 412
        assert http.delete(path, headers={"if-none-match": "*"}).status_code == 412
        twice = [("if-match", '"1"'), ("if-match", made.headers["etag"])]
        assert http.delete(path, headers=twice).status_code == 200


def test_what_a_reader_has_is_not_sent_again(house: House) -> None:
    with house.http(str(house.admin._key)) as http:
        tag = http.get("/admin/v1/teams/red").headers["etag"]
        for known in (tag, f"W/{tag}", f'"0", {tag}', "*"):
            same = http.get("/admin/v1/teams/red", headers={"if-none-match": known})
            assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag), known
            assert "content-length" not in same.headers
        other = http.get("/admin/v1/teams/red", headers={"if-none-match": '"0"'})
        assert other.json()["id"] == "red"
        assert http.get("/admin/v1/teams/red", headers={"if-match": '"0"'}).status_code == 412


# What a role may do: the owner of the fleet everything, the others what is named here.
READS = {"GET /admin/v1/whoami", "GET /admin/v1/openapi.json"}
LISTS = {f"GET /admin/v1/{p}" for p in ("organisations", "teams", "users", "keys")}
LISTS |= {"GET /admin/v1/aliases", "GET /admin/v1/issuers"}
LISTS |= {"GET /admin/v1/models", "GET /admin/v1/models/{id}"}
MATRIX = {
    "viewer": READS | LISTS | {"GET /v1/usage"},
    "member": READS | LISTS | {"GET /v1/usage"},
    "admin": READS | LISTS | {"GET /v1/usage"},
    "owner": READS | LISTS | {"GET /admin/v1/usage"},
}
KEYS = {"viewer": "red/eye", "member": "red/bob", "admin": "red/ann", "owner": "acme/boss"}
USERS = {"member": "bob", "admin": "ann"}
TOKENS = {role: f"token/{role}" for role in (*MATRIX, "unmapped", "nobody")}
TARGETS = {
    "organisations": "umbrella", "teams": "green", "users": "nobody", "models": "echo",
    "aliases": "none", "issuers": "corp", "keys": "0123456789ab", "rotate": "0123456789ab",
}  # fmt: skip


@pytest.mark.parametrize(
    ("role", "names"),
    [
        *((role, KEYS) for role in (*MATRIX, "configured", "nobody")),
        *((role, TOKENS) for role in TOKENS),
    ],
)
def test_every_route_is_closed_to_every_role_but_those_that_are_named(
    house: House, role: str, names: dict[str, str]
) -> None:
    """Each route with what belongs to another organisation, or to all; by key and by token."""
    table = [(row.method, row.path) for row in route_table(None, None)]  # type: ignore[arg-type]
    key = {"configured": house.server.key, "nobody": "sk-fb-000000000000-0"}.get(role)
    with house.http(names.get(role) or key or "") as http:
        for method, path in [*table, ("GET", "/admin/v1/openapi.json")]:
            kind = path.split("/")[3] if path.startswith("/admin") else ""
            target = path.replace("{id}", TARGETS.get(kind, "x"))
            body = {"organisation": "umbrella", "team": "green", "price": {}, "name": "x"}
            sent = None if method in ("GET", "DELETE") else body
            status = http.request(method, target, json=sent).status_code
            allowed = f"{method} {path}" in MATRIX.get(role, set())
            if role == "nobody":
                assert status == 401, (method, path)
            elif role == "unmapped":
                assert status == 403, (method, path)
            elif allowed:
                assert status == 200, (method, path)
            else:
                assert status in (400, 403, 404), (method, path, status)


def test_no_spelling_of_a_path_opens_the_admin_api(house: House) -> None:
    paths = [
        "/admin/v1/export",
        "//admin//v1/export",
        "/admin/v1/export/",
        "/v1/../admin/v1/export",
    ]
    paths += ["/admin/v1/%65xport", "/health/../admin/v1/export", "/ADMIN/v1/export"]
    for name in ("red/app", "red/ann"):
        with house.http(name) as http:
            for path in paths:
                for headers in ({}, {"host": "x/health"}, {"x-original-url": "/health"}):
                    status = http.get(path, headers=headers).status_code
                    assert status in (400, 403, 404), path


def test_a_team_admin_rules_its_team_and_nothing_above_it(house: House) -> None:
    with house.http("red/ann") as http:
        made = http.post("/admin/v1/keys", json={"team": "red", "name": "hers"})
        assert made.status_code == 201
        key_id = made.json()["id"]
        assert http.get(f"/admin/v1/keys/{key_id}").status_code == 200
        for body in (
            {"team": "red", "name": "up", "role": "owner"},
            {"team": "blue", "name": "aside"},
            {"name": "all", "role": "owner"},
        ):
            assert http.post("/admin/v1/keys", json=body).status_code == 403
        team = {"organisation": "acme", "limits": {}}
        assert http.put("/admin/v1/teams/red", json=team).status_code == 403
        assert http.get("/admin/v1/usage", params={"team": "red"}).status_code == 200
        assert http.get("/admin/v1/usage", params={"team": "blue"}).status_code == 403
        assert http.get("/admin/v1/usage").status_code == 403
        assert http.delete(f"/admin/v1/keys/{key_id}").status_code == 200
    with house.http("red/bob") as http:
        own = {"team": "red", "name": "bobs", "user": "bob"}
        assert http.post("/admin/v1/keys", json=own).status_code == 201
        assert http.post("/admin/v1/keys", json={**own, "user": "ann"}).status_code == 403
        assert {key["user"] for key in http.get("/admin/v1/keys").json()["data"]} == {"bob"}


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("aliases: [{id: a, targets: [{model: none}]}]", "neither served now nor described"),
        ("models: []\nmodels: [{id: m}]", "models is there twice in line 2"),
        (
            "organisations:\n- id: o\n  limits: {requests_per_minute: 1}\n  limits: {}",
            "limits is there twice in line 4",
        ),
        (
            "organisations: [{id: o, teams: [{id: t, keys: [{name: k, user: ann}]}]}]",
            "needs user/ann to be of its team, t",
        ),
    ],
)
def test_a_dry_run_refuses_what_would_be_refused(house: House, document: str, said: str) -> None:
    refused = house.data / "refused.yaml"
    refused.write_text(document)
    for words in (["--dry-run"], []):
        done = house.run("apply", str(refused), *words)
        assert done.returncode != 0
        assert said in done.stderr
        assert done.stdout == ""


def test_no_alias_of_a_team_is_a_way_to_a_model_that_the_team_may_not_use(house: House) -> None:
    house.admin.call("PUT", "models/foreign", {"price": {"output": 9.0}})
    house.admin.call("PUT", "aliases/echo", {"targets": [{"model": "echo"}]})
    house.admin.call("PUT", "aliases/secret", {"targets": [{"model": "foreign"}]})
    house.admin.call(
        "PUT", "aliases/red/theirs", {"team": "red", "targets": [{"model": "foreign"}]}
    )
    try:
        with house.http("red/ann") as http:
            for body in (
                {"targets": [{"model": "foreign"}]},
                {"targets": [{"model": "echo"}], "fallbacks": ["foreign"]},
            ):
                refused = http.put("/admin/v1/aliases/red/echo", json={**body, "team": "red"})
                assert refused.status_code == 403
                assert "may not use the model 'foreign'" in refused.text
            own = {"team": "red", "targets": [{"model": "echo"}]}
            assert http.put("/admin/v1/aliases/red/echo", json=own).status_code == 200
            assert http.delete("/admin/v1/aliases/red/echo").status_code == 200
            # What the fleet's owner gave it stays as it is.
            assert http.put("/admin/v1/aliases/red/theirs", json=own).status_code == 403
            assert http.delete("/admin/v1/aliases/red/theirs").status_code == 403
        for role in ("red/ann", "red/bob", "red/eye"):
            with house.http(role) as http:
                shown = {
                    kind: {each["id"] for each in http.get(f"/admin/v1/{kind}").json()["data"]}
                    for kind in ("models", "aliases")
                }
                assert shown["models"] == {"echo"}
                assert "secret" not in shown["aliases"]
                assert http.get("/admin/v1/models/foreign").status_code == 404
    finally:
        for name in ("aliases/red/theirs", "aliases/secret", "aliases/echo", "models/foreign"):
            house.admin.call("DELETE", name)


def test_an_organisation_takes_no_larger_part_of_the_engines_than_it_was_given(
    house: House,
) -> None:
    plain = {"organisation": "acme"}
    with house.http("acme/boss") as http:
        put = lambda **fields: http.put("/admin/v1/teams/ours", json=plain | fields).status_code  # noqa: E731
        assert put(weight=1000) == 403
        assert put(priority="high") == 403
        assert put(priority="high", weight=0.125) == 200
        house.admin.call("PUT", "teams/ours", {**plain, "weight": 3})
        assert put(weight=3, name="with what it was given") == 200
        assert put(weight=4) == 403
        assert http.delete("/admin/v1/teams/ours").status_code == 200


def test_no_name_steers_the_terminal_of_who_reads_it(house: House) -> None:
    with house.http("red/ann") as http:
        made = http.post("/admin/v1/keys", json={"team": "red", "name": "\x1b[2J\u202eéx\n"})
    try:
        house.server.mirrored()
        listed = house.run("keys", "list").stdout
        assert "?[2J?éx?" in listed
        assert "\x1b" not in listed
    finally:
        house.admin.call("DELETE", f"keys/{made.json()['id']}")


def test_a_cursor_beyond_everything_is_an_empty_page_or_refused_by_its_name(house: House) -> None:
    with house.http(str(house.admin._key)) as http:
        for part in ("audit", "records"):
            end = http.get(f"/admin/v1/{part}", params={"after": "9" * 19 + "-" + "9" * 19})
            assert end.json() == {"data": [], "next": None}
            beyond = http.get(f"/admin/v1/{part}", params={"after": "9" * 20 + "-0"})
            assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "after")


def test_a_query_of_too_many_fields_is_refused(house: House) -> None:
    with house.http(str(house.admin._key)) as http:
        for path in ("teams", "usage", "audit"):
            query = "&".join(f"f{number}=1" for number in range(70))
            refused = http.get(f"/admin/v1/{path}?{query}")
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "query")


def test_a_token_chats_pays_and_rules_as_its_role(house: House) -> None:
    assert ask(house.client("token/member"))
    with pytest.raises(openai.AuthenticationError):
        ask(house.client("token/nobody"))
    with pytest.raises(openai.PermissionDeniedError, match="nothing here is granted"):
        ask(house.client("token/unmapped"))

    def booked() -> bool:
        rows = house.admin.usage(by="key,user", team="red")
        return ("corp/red/bob", "bob") in {(row["key"], row["user"]) for row in rows}

    until(booked)
    with house.http("token/admin") as http:
        made = http.post("/admin/v1/keys", json={"team": "red", "name": "by-token"})
        assert made.status_code == 201
        assert http.delete(f"/admin/v1/keys/{made.json()['id']}").status_code == 200
        assert http.get("/admin/v1/issuers").json()["data"] == []
        assert http.put("/admin/v1/issuers/corp", json={}).status_code == 400
    with house.http("token/owner") as http:
        grant = {"claim": "role", "value": "x", "role": "owner"}
        body = {"issuer": "https://evil/", "audiences": ["a"], "jwks": "/k", "grants": [grant]}
        assert http.put("/admin/v1/issuers/mine", json=body).status_code == 403
    with house.http("token/root") as http:
        seen = http.get("/admin/v1/issuers/corp")
        assert seen.json()["issuer"] == "https://login.example.com/"
        assert http.get("/admin/v1/whoami").json()["role"] == "owner"
    actors = {line["who"] for line in house.admin.pages("audit")}
    assert "token corp: ann" in actors


@pytest.mark.parametrize("fault", ["pause", "kill"])
def test_with_redis_away_a_reader_is_told_at_once(tmp_path: Path, fault: str) -> None:
    with redis_running() as redis, starting() as start:
        server = start("--engine", "echo", "--redis-url", redis.url, data=tmp_path).wait_ready()
        admin = Admin(server, Secret((tmp_path / "admin-key").read_text().strip()))
        tree = {"organisations": [{"id": "o", "teams": [{"id": "t", "keys": [{"name": "k"}]}]}]}
        [token] = admin.call("POST", "apply", tree)["tokens"].values()
        base = server.url.removesuffix("/v1")
        paths = [row.path for row in route_table(None, None) if row.method == "GET"]  # type: ignore[arg-type]
        whose = {**dict.fromkeys(paths, str(admin._key)), "/v1/usage": token}
        getattr(redis, fault)()
        for path, key in whose.items():
            headers = {"authorization": f"Bearer {key}"}
            # What waits for Redis would wait 10 s for a long answer; it is 1 s for a first word.
            got = httpx.get(base + path.replace("{id}", "t"), headers=headers, timeout=8.0)
            asks_redis = path.rpartition("/")[2] in ("usage", "records", "audit")
            if asks_redis:
                assert got.status_code == 503, path
                assert int(got.headers["retry-after"]) >= 1
            else:
                assert got.status_code in (200, 404), path
        if fault == "pause":
            redis.go_on()


def test_nothing_secret_is_in_any_answer_log_or_metric(house: House) -> None:
    secrets = [*house.secrets(), (house.data / "admin-key").read_text().strip()]
    shown = [json.dumps(list(house.admin.pages("audit"))), house.run("keys", "list").stdout]
    with house.http(str(house.admin._key)) as http:
        shown += [http.get(f"/admin/v1/{part}").text for part in ("keys", "export", "records")]
        shown.append(http.get("/metrics").text)
    shown += house.server.stderr
    for text in shown:
        assert not any(secret in text for secret in secrets)
        assert '"digest"' not in text
    assert any("apply" in text for text in shown)


def test_the_admin_key_pays_for_nothing_and_a_wrong_one_is_told(house: House) -> None:
    with house.http(str(house.admin._key)) as http:
        body = {"model": "echo", "prompt": "x"}
        assert http.post("/v1/completions", json=body).status_code == 403
    with pytest.raises(StartError, match="not valid"):
        AdminClient(house.base, Secret("no")).call("GET", "whoami")
    assert house.run("whoami").stdout.splitlines()[1].startswith("the admin key  owner")


def test_the_audit_log_only_grows_and_says_who_changed_what(house: House) -> None:
    def lines() -> list[dict]:
        return list(house.admin.pages("audit"))

    before = lines()
    assert before
    key_id = house.run("keys", "create", "--team", "red", "--name", "fleeting").stdout.split("-")[2]
    house.run("keys", "delete", key_id)
    with house.http("red/ann") as http:
        made = http.post("/admin/v1/keys", json={"team": "red", "name": "passing"}).json()["id"]
        assert http.delete(f"/admin/v1/keys/{made}").status_code == 200
        assert http.get("/admin/v1/audit").status_code == 403
    after = lines()
    assert after[: len(before)] == before
    assert len(after) == len(before) + 4
    assert all(f"key/{key_id}" in json.dumps(line["what"]) for line in after[-4:-2])
    assert all(f"key/{made}" in json.dumps(line["what"]) for line in after[-2:])
    assert after[-1]["who"] != after[-3]["who"]
    with house.http(str(house.admin._key)) as http:
        for method in ("PUT", "POST", "DELETE", "PATCH"):
            assert http.request(method, "/admin/v1/audit").status_code in (404, 405)
            assert http.request(method, f"/admin/v1/audit/{after[0]['entry']}").status_code == 404
    assert lines() == after


def test_no_secret_is_in_an_answer_a_log_a_metric_or_in_redis(house: House) -> None:
    """Every token's secret part is a canary, and so is a prompt."""
    prompt = "canary-of-the-prompt"
    secrets = [*house.secrets(), str(house.admin._key), house.server.key, prompt]
    client = house.client("red/app")
    client.completions.create(model="echo", prompt=prompt, max_tokens=3)
    seen = [house.run(*words).stdout for words in (["export"], ["audit"], ["keys"], ["usage"])]
    for name in ("red/app", "red/ann", "acme/boss", str(house.admin._key)):
        with house.http(name) as http:
            for row in route_table(None, None):  # type: ignore[arg-type]
                path = row.path.replace("{id}", "red")
                if row.method == "GET":
                    seen.append(http.get(path).text)
                else:  # what is refused is answered too
                    seen.append(http.request(row.method, path, json={"secrets": secrets[:1]}).text)
            seen.append(http.get("/metrics").text)
    for token in house.tokens.values():
        with house.http(token + "x") as http:
            answer = http.get("/v1/models")
            seen += [answer.text, str(answer.headers)]
    seen += house.server.stderr
    kept = [path for path in house.data.rglob("*") if path.is_file()]
    redis = [path.read_bytes() for path in kept if "appendonly" in str(path)]
    assert sum(map(len, redis)) > 10_000, "the log of its Redis is looked through too"
    text = "\n".join(seen)
    for secret in secrets:
        assert secret not in text
        assert not any(secret.encode() in data for data in redis)
