"""The Anthropic dialect as its tests call it: whole and streamed at once, with tools to call."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from forebay_shared.models import CAP_GRAMMAR
from gateway_fakes import MODEL, Api, Play, ScriptedBackend, running_api
from messages import check_message, check_message_error, check_message_stream

TEMPLATE_WITH_ALL = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} "
    "{{ call.id }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "Says the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "cache_control": {"type": "ephemeral"},
}
TIME = {"name": "time", "input_schema": {"type": "object"}, "type": "custom"}
TOOLS = [WEATHER, TIME]
LATER = WEATHER | {"defer_loading": True}
CITY = '{"city": "}\\"你好 </b>"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]


@contextmanager
def messaging() -> Iterator[Api]:
    """A server whose model has a context of 4,096 tokens and takes grammars."""
    backend = ScriptedBackend(template=TEMPLATE_WITH_ALL, max_model_len=4096)
    backend.capabilities |= {CAP_GRAMMAR}
    with running_api(backend) as api:
        yield api


def says(api: Api, text: str, group: int = 1, **play: object) -> None:
    ids = api.backend.tokenizer.encode(text, add_special_tokens=False).ids
    api.backend.script = lambda job, index: Play(ids, group=group, **play)


def post(api: Api, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 2048, "messages": HI, **fields}
    return api.http.post("/v1/messages", json=body)


def both(api: Api, **fields: object) -> dict:
    """The message, whole and streamed: they must hold the same but for their ids."""
    response = post(api, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    streamed = check_message_stream(response.content, model=MODEL)
    response = post(api, **fields)
    assert response.status_code == 200, response.text
    whole = check_message(response.content, model=MODEL)
    assert without_ids(streamed) == without_ids(whole)
    return whole


def without_ids(message: dict) -> dict:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}


def prompt_text(api: Api) -> str:
    return api.backend.tokenizer.decode(api.backend.jobs[-1].prompt, skip_special_tokens=False)


def refused(response: httpx.Response, name: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = check_message_error(response.content)
    assert name in error["message"], error
    assert response.headers["request-id"]


def called(result: list[dict], name: str = "time") -> list[dict]:
    use = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "toolu_1", "content": result}
    return [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [answer]},
    ]
