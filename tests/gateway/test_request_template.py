"""A request's own chat template: honoured where the server allows it, and never harmful."""

from collections.abc import Iterator

import pytest
from forebay_gateway import request_template
from forebay_shared.settings import GatewaySettings
from gateway_fakes import MODEL, Api, running_api
from patience import PATIENCE_S
from transcripts import check_answer, check_error

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    with running_api(settings=GatewaySettings(trust_request_chat_template=True)) as api:
        yield api


@pytest.fixture
def api(server: Api, monkeypatch: pytest.MonkeyPatch) -> Api:
    monkeypatch.setattr(request_template, "PATIENCE_S", PATIENCE_S)
    server.reset()
    return server


def prompt_of(api: Api, **fields: object) -> str:
    response = api.chat(**fields)
    assert response.status_code == 200, response.text
    check_answer(response.content, model=MODEL)
    return api.backend.tokenizer.decode(api.backend.jobs[-1].prompt, skip_special_tokens=False)


def test_the_prompt_is_what_the_requests_template_says(api: Api) -> None:
    assert prompt_of(api, chat_template=TEMPLATE) == "[user: hi]"
    assert prompt_of(api).startswith("<|im_start|>user")
    own = prompt_of(
        api,
        chat_template="{{ messages[0].content }} {{ tone }} {{ tools | length }}",
        chat_template_kwargs={"tone": "kind"},
        tools=[TOOL],
    )
    assert own == "hi kind 1"


def test_its_tokens_are_counted_as_a_chat_with_it_has_them(api: Api) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": MODEL, "messages": messages, "chat_template": TEMPLATE}
    answer = api.http.post("/tokenize", json=body).json()
    prompt_of(api, chat_template=TEMPLATE)
    assert answer["tokens"] == api.backend.jobs[-1].prompt


def test_only_the_template_writes_control_tokens(api: Api) -> None:
    message = {"role": "user", "content": "<|im_end|>"}
    prompt_of(api, chat_template="<|im_start|>{{ messages[0].content }}", messages=[message])
    token = api.backend.tokenizer.token_to_id
    ids = api.backend.jobs[-1].prompt
    assert ids.count(token("<|im_start|>")) == 1
    assert token("<|im_end|>") not in ids


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ 'x'.center(10**9).replace('x', 'y' * 1000) }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.environ }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no') }}",
        "{{ messages | nothing }}",
        "{% if %}",
        "{" * 65_536 + "}",
        "{{ 'x' * 9000000 }}",
        "",
        5,
    ],
)
def test_no_template_harms_and_each_bad_one_is_refused_by_name(api: Api, template: object) -> None:
    response = api.chat(chat_template=template)
    assert response.status_code == 400, response.text
    assert check_error(response.content)["param"] in ("chat_template", "messages")
    assert api.chat().status_code == 200


def test_a_template_sees_no_variable_of_the_server(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_API_KEY", "sk-secret")
    shown = prompt_of(api, chat_template="a{{ environ }}{{ os }}{{ self.__dict__ }}")
    assert shown == "a"


def test_a_server_that_was_not_told_so_refuses_and_names_the_flag() -> None:
    with running_api() as api:
        response = api.chat(chat_template=TEMPLATE)
        assert response.status_code == 400
        error = check_error(response.content)
        assert error["param"] == "chat_template"
        assert "--trust-request-chat-template" in error["message"]
        assert api.chat(chat_template=None).status_code == 200
