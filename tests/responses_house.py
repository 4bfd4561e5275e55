"""What the tests of /v1/responses share: a gateway over a real Redis, calls that are checked."""

from collections.abc import Generator
from contextlib import contextmanager

import httpx
import openai
from forebay_shared.models import CAP_GRAMMAR
from forebay_shared.settings import GatewaySettings
from gateway_fakes import MODEL, TEMPLATE, Api, Play, ScriptedBackend, running_api
from patience import PATIENCE_S
from response_transcripts import check_events, check_response, without_identity

RESPONSES = "/v1/responses"
TALKING_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<tool_call><|im_end|>\n{% endif %}"
    "{% if verbosity is defined %}({{ verbosity }}){% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} {{ call.id }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
"""A template of a model that thinks and calls tools."""


@contextmanager
def responding(
    redis_url: str, settings: GatewaySettings | None = None, template: str = TEMPLATE
) -> Generator[Api]:
    """A gateway whose backend is scripted and whose Redis is real."""
    backend = ScriptedBackend(template=template, max_model_len=2048, redis_url=redis_url)
    backend.capabilities |= {CAP_GRAMMAR}
    with running_api(backend, settings) as api:
        yield api


def says(api: Api, text: str, **play: object) -> None:
    ids = api.backend.tokenizer.encode(text, add_special_tokens=False).ids
    api.backend.script = lambda job, index: Play(ids, **play)


def post(api: Api, **fields: object) -> httpx.Response:
    return api.http.post(RESPONSES, json={"model": MODEL, "input": "hi", **fields})


def plain(api: Api, **fields: object) -> dict:
    answer = post(api, **fields)
    assert answer.status_code == 200, answer.text
    return check_response(answer.content)


def streamed(api: Api, **fields: object) -> dict:
    answer = post(api, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return check_events(answer.content)


def both(api: Api, **fields: object) -> dict:
    """The answer, plain and streamed: they must be equal but for ids and times."""
    answer = plain(api, **fields)
    assert without_identity(streamed(api, **fields)) == without_identity(answer)
    return answer


def prompt(api: Api) -> str:
    return api.backend.tokenizer.decode(api.backend.jobs[-1].prompt, skip_special_tokens=False)


def sdk(api: Api) -> openai.OpenAI:
    key = api.http.headers.get("authorization", "Bearer none").removeprefix("Bearer ")
    return openai.OpenAI(base_url=api.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)
