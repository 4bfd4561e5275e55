"""Earlier calls as demanding templates want them, and control tokens that parsers need to see."""

import re
from collections.abc import Callable

import pytest
from forebay_gateway.output import OutputOptions, Vocabulary
from forebay_gateway.parts import Collected
from forebay_gateway.prompt import Renderer, TemplateOptions
from forebay_gateway.speech import Speech
from forebay_gateway.tools.base import Tool
from forebay_gateway.tools.registry import BUILT_IN
from forebay_shared.models import ModelCard
from tokenizer_house import byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import AddedToken, Tokenizer

CALL = {
    "id": "call_0123456789abcdef01234567",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": "é", "n": [1]}},
}
MESSAGES = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_id": CALL["id"]},
]
MISTRAL = (
    "{% for m in messages %}{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id|length != 9 %}{{ raise_exception('nine letters') }}"
    "{% endif %}[TOOL_CALLS]{{ c.id }}{% endfor %}"
    "{% if m.tool_call_id %}[TOOL_RESULTS]{{ m.tool_call_id }}{% endif %}{% endfor %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% for c in m.tool_calls %}"
    "{{ c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}{% endfor %}{% endfor %}"
)


def rendered(template: str) -> str:
    tokenizer = byte_level_tokenizer()
    card = ModelCard(
        names=("m",),
        revision="r",
        family="f",
        engine="e",
        tokenizer="t",
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=4096,
        block_size=16,
        created=1,
    )
    renderer = Renderer(card, tokenizer.to_str().encode(), template.encode())
    return renderer.decode(renderer.chat(MESSAGES, TemplateOptions()))


def test_a_template_that_wants_nine_letters_gets_the_same_ones_for_call_and_result() -> None:
    found = re.fullmatch(r"\[TOOL_CALLS\](\w{9})\[TOOL_RESULTS\](\w{9})", rendered(MISTRAL))
    assert found
    assert found.group(1) == found.group(2)


def test_a_template_that_joins_strings_gets_arguments_as_text() -> None:
    assert rendered(DEEPSEEK) == 'f\n```json\n{"a": "é", "n": [1]}\n```'


@pytest.mark.parametrize("make", [byte_level_tokenizer, sentencepiece_tokenizer])
def test_a_parser_sees_its_control_tokens_and_the_client_none(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")]
    )
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size())
    text = "a[OTHER][TOOL_CALLS]f[ARGS]{}"
    ids = [
        token
        for part in re.split(r"(\[[A-Z_]+\])", text)
        if part
        for token in tokenizer.encode(part, add_special_tokens=False).ids
    ]
    answer = Collected()
    speech = Speech(vocabulary, OutputOptions(), tools=BUILT_IN["mistral"]([Tool("f")]))
    answer.add(speech.push(ids) + speech.finish())
    assert "[OTHER]" not in answer.text
    assert "[" not in answer.text
    assert speech.tokens == len(ids)
    assert [call.name for call in answer.calls] == ["f"]
