"""The OpenAPI document is true: every route is in it, and what is really said is what it says."""

import json
import re
from collections.abc import Iterator

import jsonschema
import litestar
import pytest
from forebay_shared.models import CAP_GRAMMAR
from forebay_shared.settings import GatewaySettings, Secret
from gateway_fakes import MODEL, Api, Play, ScriptedBackend, running_api

HI = [{"role": "user", "content": "hi"}]
CALL = '<think>Hm.</think>So: <tool_call>{"name": "time", "arguments": {"a": 1}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ tools }}</think><tool_call>{% endfor %}"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Api, list[litestar.Litestar]]]:
    backend = ScriptedBackend(template=TEMPLATE, max_model_len=2048)
    backend.capabilities |= {CAP_GRAMMAR}
    apps: list[litestar.Litestar] = []
    with pytest.MonkeyPatch.context() as patch:
        init = litestar.Litestar.__init__

        def noted(self: litestar.Litestar, *args: object, **options: object) -> None:
            init(self, *args, **options)
            apps.append(self)

        patch.setattr(litestar.Litestar, "__init__", noted)
        with running_api(backend, GatewaySettings(api_key=(Secret("sk-test"),))) as api:
            yield api, apps


@pytest.fixture
def api(server: tuple[Api, list[litestar.Litestar]]) -> Api:
    api, _ = server
    api.reset()
    ids = api.backend.tokenizer.encode(CALL, add_special_tokens=False).ids
    api.backend.script = lambda job, index: Play(ids)
    return api


@pytest.fixture
def document(api: Api) -> dict:
    return api.http.get("/schema").json()


def validator(document: dict, schema: dict) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


def content(document: dict, method: str, path: str, kind: str, status: str = "200") -> dict:
    answer = document["paths"][path][method]["responses"][status]
    return answer["content"][kind]["schema"]


def test_every_route_is_in_it_and_nothing_else(
    server: tuple[Api, list[litestar.Litestar]], document: dict
) -> None:
    found = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in server[1][-1].routes
        for method in route.methods - {"OPTIONS", "HEAD"}
    }
    said = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert said == found


def test_it_is_sound_and_the_same_under_both_names(api: Api, document: dict) -> None:
    assert api.http.get("/openapi.json").json() == document
    assert document["openapi"] == "3.1.0"
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    known = document["components"]["schemas"]
    references = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))
    assert set(references) <= set(known)
    for methods in document["paths"].values():
        for operation in methods.values():
            assert "200" in operation["responses"]
            assert "default" in operation["responses"]


def test_it_says_what_needs_no_key(api: Api, document: dict) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "{" in path:
                continue
            answer = api.http.request(method, path, headers={"authorization": ""})
            assert (answer.status_code == 401) == ("security" not in operation), path


CALLS = {
    "/v1/chat/completions": {"messages": HI, "tools": [TOOL], "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": "hi", "logprobs": 1, "n": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 300, "tools": [
        {"name": "time", "input_schema": {"type": "object"}}
    ]},
    "/v1/responses": {"input": "hi", "store": False},
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"prompt": "hi", "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
}  # fmt: skip


@pytest.mark.parametrize("path", CALLS)
def test_real_requests_answers_and_events_are_as_it_says(
    api: Api, document: dict, path: str
) -> None:
    body = {"model": MODEL, **CALLS[path]}
    asked = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    validator(document, asked["schema"]).validate(body)
    answer = api.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    validator(document, content(document, "post", path, "application/json")).validate(answer.json())
    if "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]:
        checks = validator(document, content(document, "post", path, "text/event-stream"))
        streamed = api.http.post(path, json={**body, "stream": True})
        events = re.findall(r"^data: (\{.*)$", streamed.text, re.MULTILINE)
        assert len(events) > 5
        for event in events:
            checks.validate(json.loads(event))
    wrong = api.http.post(path, json={"model": 5})
    error = content(document, "post", path, "application/json", "default")
    validator(document, error).validate(wrong.json())
    with pytest.raises(jsonschema.ValidationError):
        validator(document, asked["schema"]).validate({"model": 5})


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ping", "/ready", "/version", "/load"])
def test_real_answers_to_get_are_as_it_says(api: Api, document: dict, path: str) -> None:
    found = api.http.get(path).json()
    validator(document, content(document, "get", path, "application/json")).validate(found)


def test_what_is_refused_by_name_is_no_property(document: dict) -> None:
    schemas = document["components"]["schemas"]
    assert "guided_json" not in schemas["ChatRequest"]["properties"]
    assert "guided_json" in schemas["ChatRequest"]["description"]
    assert "temperature" in schemas["ChatRequest"]["properties"]
    assert not any("forebay" in name for name in schemas)
    assert "container" not in schemas["MessagesRequest"]["properties"]
