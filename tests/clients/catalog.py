"""Which clients there are, and what each must do: the one list of scenarios.

A scenario is a function of that name in the client's script; what it checks is written there, in
the client's own language. A client lacks what its SDK has no word for.
"""

from dataclasses import dataclass

OPENAI = (
    "chat_plain",
    "chat_streamed",
    "chat_stream_helper",
    "chat_usage",
    "chat_n",
    "chat_stop",
    "chat_length",
    "chat_logprobs",
    "chat_parts",
    "chat_unicode",
    "chat_reasoning",
    "tools_forced",
    "tools_streamed",
    "tools_stream_helper",
    "tools_result",
    "structured_parse",
    "structured_streamed",
    "completions",
    "completions_many",
    "models",
    "embeddings",
    "responses_create",
    "responses_streamed",
    "responses_stream_helper",
    "responses_tools",
    "responses_previous",
    "responses_parse",
    "errors",
    "retries",
    "leaving",
    "raw_headers",
    "asynchronous",
)
ANTHROPIC = (
    "messages_create",
    "messages_system",
    "messages_stop",
    "messages_streamed",
    "messages_stream_helper",
    "messages_tools",
    "messages_tool_result",
    "messages_tool_runner",
    "messages_thinking",
    "count_tokens",
    "models",
    "errors",
    "leaving",
    "asynchronous",
)
ALONE = frozenset({"leaving", "retries", "asynchronous"})
"""They ask whether a server is full or idle, so that nobody else may be at work in it."""


@dataclass(frozen=True)
class Client:
    """An SDK in one version: its environment, its script, its scenarios."""

    environment: str
    script: str
    scenarios: tuple[str, ...]


def _without(*names: str) -> tuple[str, ...]:
    return tuple(name for name in OPENAI if name not in names)


_IN_LANGCHAIN = (
    "chat_plain", "chat_streamed", "chat_stop", "chat_logprobs", "chat_reasoning",
    "tools_forced", "tools_streamed", "tools_result", "structured_parse", "structured_streamed",
    "completions", "embeddings", "responses_create", "responses_streamed", "responses_tools",
    "errors", "leaving", "asynchronous",
)  # fmt: skip
_IN_AI_SDK = (
    "chat_plain", "chat_streamed", "chat_usage", "chat_stop", "chat_length", "chat_reasoning",
    "tools_forced", "tools_streamed", "tools_result", "structured_parse", "structured_streamed",
    "completions", "embeddings", "errors", "leaving", "asynchronous",
)  # fmt: skip
_IN_LITELLM = (
    "chat_plain", "chat_streamed", "tools_forced", "tools_streamed", "tools_result",
    "structured_parse", "completions", "embeddings", "responses_create", "errors", "leaving",
)  # fmt: skip
_IN_AGENTS = (
    "runs_plain", "runs_typed", "runs_with_tools", "runs_streamed", "runs_handed_over",
    "runs_on_stored_responses", "errors",
)  # fmt: skip
_IN_PYDANTIC_AI = (
    "runs_plain", "runs_streamed", "runs_typed", "runs_typed_streamed",
    "runs_with_a_history_of_tools", "errors",
)  # fmt: skip
_IN_AGENT = ("says", "works", "is_shown_a_picture", "goes_on", "errors")
_IN_OPENAI_NODE = _without("chat_parts", "responses_parse")

CLIENTS = {
    "openai-3.51.0": Client("openai-3", "openai_python.py", OPENAI),
    "openai-2.54.0": Client("openai-2", "openai_python.py", OPENAI),
    "openai-1.109.1": Client("openai-1", "openai_python.py", OPENAI),
    "openai-npm-7-node-24": Client("node-24", "openai_node.mjs", _IN_OPENAI_NODE),
    "openai-npm-6-node-20": Client("node-20", "openai_node.mjs", _IN_OPENAI_NODE),
    "ai-sdk-7-node-24": Client("node-24", "ai_sdk.mjs", _IN_AI_SDK),
    "ai-sdk-6-node-20": Client("node-20", "ai_sdk.mjs", _IN_AI_SDK),
    "langchain-openai": Client("langchain", "langchain_python.py", _IN_LANGCHAIN),
    "anthropic": Client("anthropic", "anthropic_python.py", ANTHROPIC),
    "litellm": Client("litellm", "litellm_python.py", _IN_LITELLM),
    "openai-agents": Client("agents", "agents_python.py", _IN_AGENTS),
    "pydantic-ai": Client("pydantic-ai", "pydantic_ai_python.py", _IN_PYDANTIC_AI),
    "codex": Client("coding-agents", "codex.mjs", _IN_AGENT),
    "claude-code": Client("coding-agents", "claude_code.mjs", (*_IN_AGENT, "answers_by_a_schema")),
}
