"""A call of this dialect as a chat request: the same model, template, tools and limits.

Every block is held against its message's role here, so that an error names the block that the
client sent. It knows no model and no answer.
"""

from collections.abc import Iterator, Sequence

import msgspec
from forebay_shared.errors import InvalidRequestError

from forebay_gateway.api.anthropic.reading import (
    BREAK,
    instructions,
    material_of,
    required,
    shown_of,
    text_of,
    texts_of,
)
from forebay_gateway.api.anthropic.schema import (
    Block,
    CountRequest,
    Message,
    MessagesRequest,
    OutputFormat,
)
from forebay_gateway.api.anthropic.tools import tool_choice, tool_definitions
from forebay_gateway.api.openai import schema as chat
from forebay_gateway.api.openai.structured import JsonSchemaFormat, ResponseFormat

TURN_BREAK = "\n\n"
"""What stands between two messages of one role, which are one turn."""


class _Format(ResponseFormat, frozen=True):
    at = "output_config.format"
    schema_at = "output_config.format.schema"


class _OlderFormat(ResponseFormat, frozen=True):
    at = "output_format"
    schema_at = "output_format.schema"


def chat_request(request: CountRequest) -> chat.ChatRequest:
    """Raises InvalidRequestError that names the field or the block."""
    messages = list(_conversation(request))
    _check_results(request.messages)
    continues = messages[-1].role == "assistant"
    if continues:
        _check_prefill(request.messages[-1], f"messages[{len(request.messages) - 1}]")
    choice = request.tool_choice
    common = chat.ChatRequest(
        model=request.model,
        messages=messages,
        tools=tool_definitions(request),
        tool_choice=None if choice is None else tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        response_format=_response_format(request),
        chat_template_kwargs=_template_kwargs(request),
        add_generation_prompt=False if continues else None,
        continue_final_message=True if continues else None,
        cache_salt=request.cache_salt,
    )
    if not isinstance(request, MessagesRequest):
        return common
    return msgspec.structs.replace(
        common,
        max_tokens=request.max_tokens,
        stream=request.stream,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        priority=request.priority,
    )


def _conversation(request: CountRequest) -> Iterator[chat.Message]:
    """The system's text and the turns: neighbours of one role are one turn."""
    system = instructions(request.system)
    waiting = chat.Message("system", system) if system else None
    for i, message in enumerate(request.messages):
        for said in _said(message, f"messages[{i}]"):
            if waiting is not None and _is_one_turn(waiting, said):
                waiting = _joined(waiting, said)
                continue
            if waiting is not None:
                yield waiting
            waiting = said
    if waiting is not None:
        yield waiting


def _check_results(messages: Sequence[Message]) -> None:
    """Every result answers a call before it, as chats want it: found here, it has its own name."""
    called: set[str | None] = set()
    for i, message in enumerate(messages):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if block.type == "tool_use":
                called.add(block.id)
            elif block.type == "tool_result" and block.tool_use_id not in called:
                at = f"messages[{i}].content[{j}].tool_use_id"
                raise InvalidRequestError(
                    f"{at} must be the id of a tool_use block before it.", param=at
                )


def _is_one_turn(first: chat.Message, then: chat.Message) -> bool:
    return first.role == then.role != "tool" and not first.tool_calls


def _joined(first: chat.Message, then: chat.Message) -> chat.Message:
    texts = [text for text in (first.content, then.content) if isinstance(text, str) and text]
    thoughts = [text for text in (first.reasoning_content, then.reasoning_content) if text]
    return chat.Message(
        first.role,
        TURN_BREAK.join(texts),
        reasoning_content=TURN_BREAK.join(thoughts) or None,
        tool_calls=then.tool_calls,
    )


def _said(message: Message, at: str) -> Iterator[chat.Message]:
    """One message as one or more of a chat: each tool result is a message of its own there."""
    blocks = message.content
    if message.role not in ("user", "assistant", "system"):
        raise InvalidRequestError(
            f"{at}.role must be user, assistant or system.", param=f"{at}.role"
        )
    if isinstance(blocks, str):
        yield chat.Message(message.role, blocks)
    elif message.role == "assistant":
        yield _assistant(blocks, f"{at}.content")
    elif message.role == "system":
        yield chat.Message("system", BREAK.join(texts_of(blocks, f"{at}.content")))
    else:
        yield from _user(blocks, f"{at}.content")


def _user(blocks: Sequence[Block], at: str) -> Iterator[chat.Message]:
    """What stands beside results is a tool's as well: so Claude Code shows the PDF that it read."""
    of_tools = any(block.type == "tool_result" for block in blocks)
    reads = shown_of if of_tools else material_of
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(reads(block, f"{at}[{i}]", "text or tool_result"))
            continue
        if texts:
            yield chat.Message("user", BREAK.join(texts))
            texts.clear()
        yield _tool_result(block, f"{at}[{i}]")
    if texts or not blocks:
        yield chat.Message("user", BREAK.join(texts))


def _tool_result(block: Block, at: str) -> chat.Message:
    """Templates know no failed result, so the text says that it is one."""
    text = block.content
    if not isinstance(text, str):
        shown = enumerate(text or ())
        text = BREAK.join([shown_of(each, f"{at}.content[{i}]") for i, each in shown])
    if block.is_error:
        text = f"Error: {text}" if text else "Error"
    return chat.Message("tool", text, tool_call_id=required(block.tool_use_id, at, "tool_use_id"))


def _assistant(blocks: Sequence[Block], at: str) -> chat.Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[chat.ToolCall] = []
    for i, block in enumerate(blocks):
        where = f"{at}[{i}]"
        match block.type:
            case "thinking":
                thoughts.append(required(block.thinking, where, "thinking"))
            case "redacted_thinking":
                pass  # nobody but the one who made it can read it
            case "tool_use":
                calls.append(_tool_call(block, where))
            case _:
                texts.append(text_of(block, where, "text, thinking or tool_use"))
    return chat.Message(
        "assistant",
        BREAK.join(texts),
        reasoning_content=BREAK.join(text for text in thoughts if text) or None,
        tool_calls=calls or None,
    )


def _tool_call(block: Block, at: str) -> chat.ToolCall:
    arguments = bytes(block.input).decode(errors="replace")
    if not arguments.startswith("{"):
        raise InvalidRequestError(f"{at}.input must be an object.", param=f"{at}.input")
    function = chat.FunctionCall(required(block.name, at, "name"), arguments)
    return chat.ToolCall(function, id=required(block.id, at, "id"), type="function")


def _check_prefill(message: Message, at: str) -> None:
    """The model goes on behind the last block of an answer that is begun: it must be text."""
    if isinstance(message.content, str) or not message.content:
        return
    last = message.content[-1].type
    if last != "text":
        raise InvalidRequestError(
            f"{at} must not end with {last}: the last message is what the model goes on with.",
            param=at,
        )


def _response_format(request: CountRequest) -> ResponseFormat | None:
    config, older = request.output_config, request.output_format
    newer = config.format if config else None
    if newer is not None and older is not None:
        raise InvalidRequestError(
            "output_config.format and output_format exclude each other.", param="output_format"
        )
    format_: OutputFormat | None = newer or older
    if format_ is None:
        return None
    named = _Format if newer else _OlderFormat
    if format_.type != "json_schema":
        at = f"{named.at}.type"
        raise InvalidRequestError(f"{at} must be json_schema.", param=at)
    return named("json_schema", JsonSchemaFormat("answer", format_.schema))


def _template_kwargs(
    request: CountRequest,
) -> dict[str, str | int | float | bool | None]:
    """How hard to think, under the names by which templates know it; what the client says of the
    template itself goes before."""
    kwargs: dict[str, str | int | float | bool | None] = {}
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        kwargs |= {"enable_thinking": thinks, "thinking": thinks}
    if request.output_config is not None and request.output_config.effort is not None:
        kwargs["reasoning_effort"] = request.output_config.effort
    return kwargs | (request.chat_template_kwargs or {})
