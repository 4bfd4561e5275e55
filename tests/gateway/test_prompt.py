"""Messages to token ids: equal to transformers, and closed to control tokens in clients' texts."""

import asyncio
import threading
from datetime import datetime

import msgspec
import pytest
from forebay_gateway import renderers as renderers_module
from forebay_gateway.prompt import Renderer, TemplateOptions
from forebay_gateway.renderers import INLINE_CHARS, MAX_BORROWED, MAX_RENDERERS, Renderers
from forebay_shared.errors import BusError, ContextLengthError, InvalidRequestError
from forebay_shared.models import CAP_TEXT, ModelCard
from gateway_fakes import TEMPLATE, ScriptedBackend
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_house import SPECIALS, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

TOKENIZER = byte_level_tokenizer()
BOS, START, END = (TOKENIZER.token_to_id(text) for text in SPECIALS)

TEMPLATES = {
    "chatml": TEMPLATE,
    "bos and trim": (
        "{{ bos_token }}{%- for message in messages %}\n"
        "  {%- if message.role == 'system' and loop.first %}\n"
        "[S]{{ message.content | trim }}[/S]\n"
        "    {%- continue %}\n"
        "  {%- endif %}\n"
        "[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "json and namespace": (
        "{% set ns = namespace(count=0) %}{% for m in messages %}{% set ns.count = ns.count + 1 %}"
        "{{ m | tojson }}{% generation %}{{ m.content[::-1] }}{% endgeneration %}"
        "{% endfor %}{{ ns.count }}{{ {'é': '<&>'} | tojson(indent=2) }}"
    ),
}


def renderer(
    template: str | None = TEMPLATE, tokenizer: Tokenizer = TOKENIZER, max_model_len: int = 4096
) -> Renderer:
    card = ModelCard(
        names=("m",),
        revision="r",
        family="llama",
        engine="echo",
        tokenizer="t",
        vocab_size=tokenizer.get_vocab_size(),
        max_model_len=max_model_len,
        block_size=16,
        created=1,
        bos_token_id=BOS,
        template_tokens={"bos_token": SPECIALS[0], "eos_token": SPECIALS[2]},
    )
    return Renderer(card, tokenizer.to_str().encode(), template and template.encode())


RENDERERS = {name: renderer(template) for name, template in TEMPLATES.items()}
REFERENCES = {
    name: PreTrainedTokenizerFast(
        tokenizer_object=TOKENIZER,
        chat_template=template,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[2],
    )
    for name, template in TEMPLATES.items()
}
CONTENT = st.text(
    st.one_of(st.sampled_from(" ab\n<|é你😀"), st.characters(exclude_categories=["Cs"])),
    max_size=30,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT}
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=MESSAGES, add=st.booleans())
@settings(max_examples=80, deadline=None)
def test_ids_equal_transformers(name: str, messages: list[dict[str, str]], add: bool) -> None:
    ours = RENDERERS[name].chat(messages, TemplateOptions(add_generation_prompt=add))
    theirs = REFERENCES[name].apply_chat_template(
        messages, add_generation_prompt=add, tokenize=True, return_dict=False
    )
    assert ours == theirs


@given(parts=st.lists(st.one_of(st.sampled_from(SPECIALS), CONTENT), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_special_tokens_in_a_clients_text_are_plain_text(parts: list[str]) -> None:
    text = "".join(parts)
    ids = RENDERERS["chatml"].chat([{"role": "user", "content": text}], TemplateOptions())
    assert [i for i in ids if i in (BOS, START, END)] == [START, END, START]
    rendered = f"{SPECIALS[1]}user\n{text}{SPECIALS[2]}\n{SPECIALS[1]}assistant\n"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == rendered


def test_special_tokens_are_plain_text_in_every_string_of_a_message() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ note }}"
    call = {"function": {"name": f"f{SPECIALS[1]}", "arguments": {"a": [SPECIALS[2]]}}}
    message = {"role": "user", "name": SPECIALS[1], "content": "x", "tool_calls": [call]}
    ids = renderer(template).chat([message], TemplateOptions(kwargs={"note": SPECIALS[2]}))
    assert not {BOS, START, END} & set(ids)


def test_the_last_message_is_continued_exactly_after_its_text() -> None:
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "The answer is "},
    ]
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    ids = RENDERERS["chatml"].chat(messages, options)
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text.endswith(f"{SPECIALS[1]}assistant\nThe answer is ")


def test_a_raw_prompt_has_one_bos_token_at_most() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], BOS)]
    )
    ours = renderer(tokenizer=tokenizer)
    assert ours.text("hi") == ours.text(f"{SPECIALS[0]}hi")
    assert ours.text("hi").count(BOS) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ messages.x.y.z }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content + 1 }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        renderer(template).chat([{"role": "user", "content": "x"}], TemplateOptions())


def test_a_refusing_template_tells_why() -> None:
    with pytest.raises(InvalidRequestError, match="Roles must alternate"):
        renderer("{{ raise_exception('Roles must alternate') }}").chat(
            [{"role": "user", "content": "x"}], TemplateOptions()
        )


def test_a_model_without_a_template_says_where_to_go() -> None:
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        renderer(None).chat([{"role": "user", "content": "x"}], TemplateOptions())


def test_a_hopelessly_long_text_is_refused_without_tokenising() -> None:
    ours = renderer(max_model_len=16)
    text = "x" * (16 * ours.vocabulary.longest)
    with pytest.raises(ContextLengthError, match=r"length is 16 tokens.*at least 16 tokens"):
        ours.text(text)
    with pytest.raises(ContextLengthError):
        ours.chat([{"role": "user", "content": text}], TemplateOptions())


async def test_large_work_leaves_the_event_loop_and_small_work_stays() -> None:
    renderers = Renderers(ScriptedBackend().blob)
    here = threading.get_ident()
    assert await renderers.run(threading.get_ident, INLINE_CHARS) == here
    assert await renderers.run(threading.get_ident, INLINE_CHARS + 1) != here


async def test_so_many_wait_for_other_processes_and_who_leaves_takes_no_place() -> None:
    renderers = Renderers(ScriptedBackend().blob)
    running, go_on = threading.Semaphore(0), threading.Event()
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        running.release()
        go_on.wait()
        raise InvalidRequestError("too long")

    calls = [
        asyncio.create_task(renderers.patiently(lambda at=at: work(at)))
        for at in range(MAX_BORROWED + 3)
    ]
    for _ in range(MAX_BORROWED):
        await asyncio.to_thread(running.acquire)
    left = calls.pop(0), calls.pop()
    for call in left:
        call.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert len(begun) == MAX_BORROWED
    go_on.set()
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(end, InvalidRequestError) for end in ends)
    assert len(begun) == MAX_BORROWED + 2


async def test_a_renderer_is_loaded_once_for_all_who_wait() -> None:
    backend = ScriptedBackend()
    fetched: list[str] = []

    async def blob(sha256: str) -> bytes:
        fetched.append(sha256)
        await asyncio.sleep(0)
        return await backend.blob(sha256)

    renderers = Renderers(blob)
    found = await asyncio.gather(*[renderers.get(backend.card) for _ in range(5)])
    assert len(set(map(id, found))) == 1
    assert len(fetched) == 2


async def test_a_renderer_is_prepared_once_its_files_are_there_and_a_broken_one_harms_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(renderers_module, "_PREPARE_AGAIN_S", 0.0)
    backend = ScriptedBackend()
    asked: list[str] = []

    async def late(sha256: str) -> bytes:
        asked.append(sha256)
        if len(asked) < 3:
            raise BusError("not yet")
        return await backend.blob(sha256)

    renderers = Renderers(late)
    await renderers.prepare(backend.card)
    count = len(asked)
    await renderers.get(backend.card)
    assert len(asked) == count == 4

    async def broken(sha256: str) -> bytes:
        return b"no tokenizer"

    await Renderers(broken).prepare(backend.card)

    await Renderers(broken).prepare(
        msgspec.structs.replace(backend.card, capabilities=frozenset({CAP_TEXT}))
    )

    async def never(sha256: str) -> bytes:
        raise BusError("never")

    await Renderers(never).prepare(backend.card)


def test_a_template_that_drops_the_last_message_cannot_continue_it() -> None:
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="cannot continue"):
        renderer("nothing").chat([{"role": "assistant", "content": "x"}], options)


def test_special_tokens_are_plain_text_for_sentencepiece_and_add_no_space() -> None:
    tokenizer = sentencepiece_tokenizer()
    ours = renderer("<s>{{ messages[0].content }}</s>", tokenizer)
    ids = ours.chat([{"role": "user", "content": "a</s>b<s>"}], TemplateOptions())
    assert [i for i in ids if i in (1, 2)] == [1, 2]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a</s>b<s>"


def test_the_clock_that_a_template_may_ask_for_is_this_years() -> None:
    before = datetime.now()
    ids = renderer("{{ strftime_now('%Y') }}").chat([{"role": "user"}], TemplateOptions())
    assert TOKENIZER.decode(ids) in (str(before.year), str(datetime.now().year))


async def test_only_so_many_renderers_are_kept() -> None:
    backend = ScriptedBackend()
    fetched: list[str] = []

    async def blob(sha256: str) -> bytes:
        fetched.append(sha256)
        return await backend.blob(sha256)

    renderers = Renderers(blob)
    cards = [
        msgspec.structs.replace(backend.card, max_model_len=length, chat_template=None)
        for length in range(100, 100 + MAX_RENDERERS + 1)
    ]
    for card in cards:
        await renderers.get(card)
    await renderers.warm(cards[1:])
    assert len(fetched) == len(cards)
    await renderers.get(cards[0])
    assert len(fetched) == len(cards) + 1


FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% if messages[0].role == 'system' %}[system]{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + ALTERNATING
)


def turns(roles: str) -> list[dict[str, str]]:
    """`su` is a system message that says 0 and a user's that says 1."""
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": str(i)} for i, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("template", "roles", "text"),
    [
        (FIRST_ONLY, "suau", "[system]0[user]1[assistant]2[user]3"),
        (FIRST_ONLY, "ssu", "[system]0\n\n1[user]2"),
        (FIRST_ONLY, "suasu", "[system]0[user]1[assistant]2[user]3[user]4"),
        (FIRST_ONLY, "us", "[user]0[user]1"),
        (ALTERNATING, "suuauu", "[system]0[user]1\n\n2[assistant]3[user]4\n\n5"),
        (ALTERNATING, "suasu", "[system]0[user]1[assistant]2[user]3\n\n4"),
        (ALTERNATING, "uaau", "[user]0[assistant]1\n\n2[user]3"),
        (ALTERNATING, "sau", "[user]0[assistant]1[user]2"),
        (ALTERNATING, "au", "[user][assistant]0[user]1"),
        (NO_SYSTEM, "su", "[user]0\n\n1"),
        (NO_SYSTEM, "s", "[user]0"),
        (NO_SYSTEM, "suasu", "[user]0\n\n1[assistant]2[user]3\n\n4"),
    ],
)
def test_what_a_strict_template_refuses_is_said_in_an_order_that_it_takes(
    template: str, roles: str, text: str
) -> None:
    rendering = renderer(template)
    assert rendering.decode(rendering.chat(turns(roles), TemplateOptions())) == text


def test_a_late_system_message_leaves_what_was_said_before_it_as_it_was() -> None:
    strict = renderer(FIRST_ONLY)
    before, after = (strict.chat(turns(roles), TemplateOptions()) for roles in ("sua", "suas"))
    assert after[: len(before)] == before


def test_a_template_that_refuses_every_order_is_heard_on_the_clients_own() -> None:
    rude = renderer("{{ raise_exception('no ' ~ messages | length) }}")
    with pytest.raises(InvalidRequestError, match="refuses these messages: no 3"):
        rude.chat(turns("ssu"), TemplateOptions())
