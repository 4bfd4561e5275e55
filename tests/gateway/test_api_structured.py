"""Structured output at the edge: what becomes a grammar, and what is refused by field."""

import json
from collections.abc import Iterator

import pytest
from forebay_gateway.api.openai.structured import MAX_SCHEMA_DEPTH
from forebay_shared.models import CAP_GENERATE, CAP_GRAMMAR
from forebay_shared.sampling import MAX_GRAMMAR_BYTES, Grammar
from gateway_fakes import MODEL, Api, ScriptedBackend, running_api
from transcripts import check_answer, check_error

SCHEMA = '{"type": "object", "properties": {"zeta": {}, "alpha": {"enum": ["}", 1.50]}}}'


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    backend = ScriptedBackend(capabilities=frozenset({CAP_GENERATE, CAP_GRAMMAR}))
    with running_api(backend) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Iterator[Api]:
    server.reset()
    yield server
    check_answer(server.chat().content, model=MODEL)  # the canary


def raw(fields: str, asks: str = '"messages": [{"role": "user", "content": "hi"}]') -> bytes:
    return f'{{"model": "{MODEL}", {asks}, {fields}}}'.encode()


def as_format(schema: str) -> str:
    head = '"response_format": {"type": "json_schema", "json_schema": {"name": "x", '
    return head + schema + "}}"


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        (
            as_format(f'"schema": {SCHEMA}, "strict": true'),
            Grammar("json_schema", SCHEMA, field="response_format"),
        ),
        (as_format('"schema": {}'), Grammar("json_schema", "{}", field="response_format")),
        (
            '"response_format": {"type": "json_object"}',
            Grammar("json_object", field="response_format"),
        ),
        (
            f'"response_format": {{"type": "json_object", "schema": {SCHEMA}}}',
            Grammar("json_schema", SCHEMA, field="response_format"),
        ),
        (
            '"response_format": {"type": "json_object", "schema": null}',
            Grammar("json_object", field="response_format"),
        ),
        ('"response_format": {"type": "text"}', None),
        ('"response_format": null, "structured_outputs": null', None),
        (f'"structured_outputs": {{"json": {SCHEMA}}}', Grammar("json_schema", SCHEMA)),
        (
            f'"structured_outputs": {{"json": {json.dumps(SCHEMA)}}}',
            Grammar("json_schema", SCHEMA),
        ),
        ('"structured_outputs": {"json_object": true}', Grammar("json_object")),
        ('"structured_outputs": {"regex": "[ab]"}', Grammar("regex", "[ab]")),
        ('"structured_outputs": {"choice": ["é", "b"]}', Grammar("choice", '["é","b"]')),
        ('"structured_outputs": {"grammar": "start: x"}', Grammar("lark", "start: x")),
    ],
)
def test_the_engine_gets_the_clients_own_text(
    api: Api, fields: str, grammar: Grammar | None
) -> None:
    headers = {"content-type": "application/json"}
    bodies = {
        "/v1/chat/completions": raw(fields),
        "/v1/completions": raw(fields, '"prompt": "hi"'),
    }
    for path, body in bodies.items():
        assert api.http.post(path, content=body, headers=headers).status_code == 200
    assert [job.sampling.grammar for job in api.backend.jobs] == [grammar] * 2


def format_of(json_schema: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def nested(depth: int) -> object:
    schema: object = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "nope"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (format_of({"schema": {}}), "response_format.json_schema.name"),
        (format_of({"name": "a b", "schema": {}}), "response_format.json_schema.name"),
        (format_of({"name": "x"}), "response_format.json_schema.schema"),
        (format_of({"name": "x", "schema": None}), "response_format.json_schema.schema"),
        (format_of({"name": "x", "schema": False}), "response_format.json_schema.schema"),
        (format_of({"name": "x", "schema": []}), "response_format.json_schema.schema"),
        (format_of({"name": "x", "schema": "{"}), "response_format.json_schema.schema"),
        (
            format_of({"name": "x", "schema": nested(MAX_SCHEMA_DEPTH)}),
            "response_format.json_schema.schema",
        ),
        (
            format_of({"name": "x", "schema": {"pattern": "a" * MAX_GRAMMAR_BYTES}}),
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 50_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"title": "\\ud800"}'}}, "structured_outputs.json"),
        (
            format_of({"name": "x", "schema": '{"a": "\\udc00"}'}),
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}},
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {
                "structured_outputs": {"regex": "a"},
                "response_format": {"type": "json_object"},
            },
            "structured_outputs",
        ),
    ],
)
def test_what_is_malformed_is_a_400_that_names_the_field(
    api: Api, fields: dict, param: str
) -> None:
    for answer in (api.chat(**fields), api.chat(stream=True, **fields), api.complete(**fields)):
        error = check_error(answer.content, status=400, content_type=answer.headers["content-type"])
        assert (error["param"] or "").replace("[0]", "") == param
    assert not api.backend.jobs


@pytest.mark.parametrize(
    "bad", [b'"\\ud800"', b'{"a": "\\udc00"}', b'"\xff"', b'{"\xed\xa0\x80": 1}']
)
def test_a_schema_that_is_no_unicode_is_a_400(api: Api, bad: bytes) -> None:
    for form in (b'"structured_outputs":{"json":%b}', b'"response_format":{"type":"json_schema",'
                 b'"json_schema":{"name":"x","schema":%b}}'):  # fmt: skip
        messages = b'"messages":[{"role":"user","content":"x"}]'
        body = b'{"model":"org/scripted",%b,%b}' % (messages, form % bad)
        answer = api.http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        check_error(answer.content, status=400)
    assert not api.backend.jobs


@pytest.mark.parametrize("depth", [1_000, 20_000])
def test_a_schema_nested_past_all_measure_is_a_400(api: Api, depth: int) -> None:
    body = raw(as_format('"schema": ' + '{"a":' * depth + "1" + "}" * depth))
    answer = api.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar"])
def test_a_removed_name_is_refused_with_the_new_one(api: Api, kind: str) -> None:
    answer = api.chat(**{f"guided_{kind}": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"guided_{kind}"
    assert f"structured_outputs.{kind}" in answer.json()["error"]["message"]


def test_an_engine_without_grammars_refuses_them_by_name() -> None:
    with running_api(ScriptedBackend(capabilities=frozenset({CAP_GENERATE}))) as api:
        for field, value in (
            ("response_format", {"type": "json_object"}),
            ("structured_outputs", {"regex": "a"}),
        ):
            error = api.chat(**{field: value}).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", field)
        assert api.chat(response_format={"type": "text"}).is_success


ONE = {"type": "string"}


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ({"propertyNames": ONE, "additionalProperties": ONE}, {"additionalProperties": ONE}),
        ({"propertyNames": {"title": "Key", **ONE}}, {}),
        ({"items": [{"propertyNames": True}, ONE]}, {"items": [{}, ONE]}),
        ({"properties": {"format": {"format": "password"}}}, {"properties": {"format": {}}}),
        (
            {"anyOf": [ONE | {"format": "cuid2"}, {"type": "null"}]},
            {"anyOf": [ONE, {"type": "null"}]},
        ),
        ({"$defs": {"é": {"uniqueItems": False}}}, {"$defs": {"é": {}}}),
        ({"unevaluatedProperties": {}, "dependentRequired": {}}, {}),
        ({"minItems": 2.0, "maxLength": 3.0}, {"minItems": 2, "maxLength": 3}),
    ],
)
def test_what_asks_for_nothing_in_a_schema_is_left_out(api: Api, said: dict, left: dict) -> None:
    """vercel/ai#20621, mastra#19273: zod writes propertyNames into the schema of every record."""
    api.chat(**format_of({"name": "x", "schema": said}))
    grammar = api.backend.jobs[-1].sampling.grammar
    assert grammar is not None
    assert json.dumps(json.loads(grammar.source)) == json.dumps(left)


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"type": "number"}},
        {"format": "iri", "uniqueItems": True, "unevaluatedProperties": False},
        {"const": {"format": "password", "propertyNames": True}, "minimum": 1.0},
        {"enum": [{"uniqueItems": False}], "default": {"format": "x"}, "format": ["x"]},
        {"dependentRequired": {"a": ["b"]}, "multipleOf": 0.01},
    ],
)
def test_what_asks_for_something_stays_to_the_letter(api: Api, schema: dict) -> None:
    text = json.dumps(schema, indent=3)
    headers = {"content-type": "application/json"}
    body = raw(f'"structured_outputs": {{"json": {text}}}')
    assert api.http.post("/v1/chat/completions", content=body, headers=headers).is_success
    assert api.backend.jobs[-1].sampling.grammar == Grammar("json_schema", text)
