"""The offline API, on a small random model with a tokenizer of whole words."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapter_house import make_adapter
from forebay_shared.errors import ContextLengthError, ModelNotFoundError
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import StartError
from forebay_worker.llm import LLM
from tiny_models import VOCAB, make_model
from tokenizers import Tokenizer, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}w3 {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}w4{% endif %}"
)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tiny")
    make_model("llama", home)
    tokenizer = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(home / "tokenizer.json"))
    (home / "chat_template.jinja").write_text(TEMPLATE)
    return home


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    return LLM(str(directory), block_size=4, kv_cache_memory_bytes=1_000_000)


def test_texts_and_token_ids_give_the_same_in_order(llm: LLM) -> None:
    texts = llm.generate(["w3 w4 w5", "w6 w7"], GREEDY, progress=False)
    ids = llm.generate([[3, 4, 5], [6, 7]], GREEDY, progress=False)
    assert [result.token_ids for result in texts] == [result.token_ids for result in ids]
    assert [result.prompt_token_ids for result in texts] == [[3, 4, 5], [6, 7]]
    assert texts[0].text == " ".join(f"w{token}" for token in texts[0].token_ids)
    assert texts[0].outputs[0].finish_reason == "length"


def test_one_text_is_a_batch_of_one(llm: LLM) -> None:
    (result,) = llm.generate("w3", GREEDY, progress=False)
    assert len(result.token_ids) == 6


def test_chat_renders_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "w5"}]
    (one,) = llm.chat(conversation, GREEDY, progress=False)
    assert one.prompt_token_ids == [3, 5, 4]
    several = llm.chat([conversation, conversation], GREEDY, progress=False)
    assert [result.token_ids for result in several] == [one.token_ids] * 2


def test_an_adapter_answers_by_its_name(tmp_path: Path, directory: Path) -> None:
    merged = make_adapter(make_model("llama", tmp_path / "same"), tmp_path / "sql")
    modules = (f"sql={tmp_path / 'sql'}",)
    llm = LLM(
        str(directory),
        block_size=4,
        kv_cache_memory_bytes=1_000_000,
        enable_lora=True,
        lora_modules=modules,
    )
    (plain,) = llm.generate([[3, 4, 5]], GREEDY, progress=False)
    (adapted,) = llm.generate([[3, 4, 5]], GREEDY, progress=False, adapter="sql")
    assert plain.token_ids != adapted.token_ids
    with torch.inference_mode():
        logits = merged(torch.tensor([[3, 4, 5, *adapted.token_ids]])).logits[0]
    assert logits[2:-1].argmax(-1).tolist() == adapted.token_ids
    with pytest.raises(ModelNotFoundError):
        llm.generate([[3]], GREEDY, progress=False, adapter="law")


def test_n_samples_differ_and_can_be_repeated(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=2, seed=5, ignore_eos=True)
    runs = [llm.generate("w3", sampling, n=3, progress=False)[0].outputs for _ in range(2)]
    assert [output.token_ids for output in runs[0]] == [output.token_ids for output in runs[1]]
    assert len({tuple(output.token_ids) for output in runs[0]}) == 3


def test_logprobs_come_one_per_token(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
    (result,) = llm.generate("w3", sampling, progress=False)
    assert len(result.outputs[0].logprobs) == 5
    assert all(len(entry.top) == 2 for entry in result.outputs[0].logprobs)


def test_a_prompts_own_logprobs_come_one_per_token_but_the_first(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    (result,) = llm.generate("w3 w4 w5", sampling, progress=False)
    assert result.prompt_logprobs is not None
    first, *others = result.prompt_logprobs
    assert first is None
    assert [entry is not None and entry.rank >= 1 for entry in others] == [True, True]
    assert llm.generate("w3", GREEDY, progress=False)[0].prompt_logprobs is None


def test_a_prompt_that_cannot_run_raises_and_leaves_the_model_usable(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate([[3] * 4, [3] * 500], GREEDY, progress=False)
    assert llm.generate([[3] * 4], GREEDY, progress=False)[0].token_ids


def test_more_prompts_than_a_servers_queue_run(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0)
    prompts = [[3, at % VOCAB] for at in range(1100)]
    assert len(llm.generate(prompts, sampling, progress=False)) == 1100


def test_an_unknown_setting_or_model_is_named(directory: Path) -> None:
    with pytest.raises(TypeError, match="max_sequences"):
        LLM(str(directory), max_sequences=4)
    with pytest.raises(StartError, match="nowhere"):
        LLM("nowhere")
