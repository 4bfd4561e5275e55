"""The newcomer's first answer: `forebay serve` with the demo model, through the SDK."""

from collections.abc import Iterator

import openai
import pytest
from patience import PATIENCE_S
from serve_house import Serve, starting, until

pytestmark = pytest.mark.system

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with starting() as start:
        yield start().wait_ready()


def test_it_has_its_name_and_knows_the_capital_of_france(server: Serve) -> None:
    assert server.model == "smollm2-135m-instruct"
    with server.client(timeout=PATIENCE_S) as client:
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
    with server.client(timeout=PATIENCE_S) as client:
        for _ in range(2):
            answer = client.chat.completions.create(
                model=server.model, messages=long, temperature=0, max_tokens=1
            )
    assert answer.usage.prompt_tokens_details.cached_tokens > 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_in_a_long_prefill_frees_the_engine(
    server: Serve, stream: bool
) -> None:
    """Some 6,000 tokens are many steps of work: the cancel is heard between two of them."""
    words = " ".join(str(number) for number in range(2000 + stream, 3200))
    aborted, computed = _aborted(server), server.metric("vllm:prompt_tokens_total")
    with server.client(timeout=openai.Timeout(PATIENCE_S, read=1.0)) as client:
        with pytest.raises(openai.APITimeoutError):
            list(client.completions.create(model=server.model, prompt=words, stream=stream))
        until(lambda: _aborted(server) > aborted)
        until(lambda: server.metric("vllm:num_requests_running") == 0)
    assert server.metric("vllm:prompt_tokens_total") - computed < 5000, "it was over before"
    until(lambda: server.metric("vllm:kv_cache_usage_perc") == 0)


def _aborted(server: Serve) -> float:
    return server.metric("vllm:request_success_total", finished_reason="abort")
