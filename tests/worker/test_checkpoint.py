"""A model's name becomes a directory; the demo model's is equal to what transformers reads."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forebay_worker.checkpoint import CheckpointError, public_name, resolve
from forebay_worker.checkpoint.convert import MANIFEST
from forebay_worker.checkpoint.gguf_tensors import unpermuted
from forebay_worker.checkpoint.resolve import demo_file
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

TEXTS = [
    "",
    "Hello, world! It's what we've got; they'll say I'd...",
    "def f(x):\n\tif x > 10:\n        return {'a': [1, 22, 333]}\n\n\n# done\r\n",
    "  leading and trailing   spaces  \n\n \n",
    "naïve café, Ω≈ç√∫, 東京タワー, 한국어, हिन्दी, العربية, עברית, ไทย",
    "👩‍👩‍👧‍👦 🇫🇷 ❤️‍🔥 e\u0301 \u200b\ufeff\u00a0\u2003x",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>",
    "SELECT * FROM t WHERE a='b'; -- 3.14159e-10 0xDEADBEEF",
    "\x00\x01\x7f null and control",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]
UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
"""Bytes that SmolLM2's vocabulary lacks; so do 0xf1 and 0xf2, which start U+40000 and beyond."""
DIGITS_ALONE = {
    # llama.cpp's ids. Digits are parted first, as SmolLM2 was trained; transformers' reading of
    # GGUF files does not know that, and splits runs of spaces otherwise.
    "x  12": [104, 256, 33, 34],
    "\n\n12": [1116, 33, 34],
    "½ ² ٣٤": [16738, 216, 19133, 216, 164, 113, 164, 114],
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return resolve("", progress=False)


def test_the_demo_model_has_the_name_config_and_files_that_everyone_reads(demo: Path) -> None:
    assert demo.name == public_name("") == "smollm2-135m-instruct"
    config = json.loads((demo / "config.json").read_text())
    reference = AutoConfig.from_pretrained(demo)
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
    assert reference.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert json.loads((demo / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_demo_models_tensors_equal_those_that_transformers_dequantises(demo: Path) -> None:
    file = demo_file()
    reference = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).state_dict()
    ours = load_file(demo / "model.safetensors")
    assert reference.pop("lm_head.weight") is not None  # tied
    assert ours.keys() == reference.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, reference[name].to(tensor.dtype)), name


def test_the_demo_models_ids_and_template_equal_those_of_transformers(demo: Path) -> None:
    file = demo_file()
    reference = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ours = AutoTokenizer.from_pretrained(demo)
    for text in TEXTS:
        assert ours.encode(text) == reference.encode(text), text
        assert ours.decode(ours.encode(text)) == reference.decode(reference.encode(text))
    for text, ids in DIGITS_ALONE.items():
        assert ours.encode(text) == ids, text
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        chat = [*system, {"role": "user", "content": "Hi  \n"}]
        for start in (True, False):
            rendered = [
                t.apply_chat_template(chat, tokenize=False, add_generation_prompt=start)
                for t in (ours, reference)
            ]
            assert rendered[0] == rendered[1]


@settings(deadline=None, max_examples=50)
@given(
    st.text(
        st.characters(exclude_characters=UNKNOWN, exclude_categories=["Cs"], max_codepoint=0x3FFFF),
        max_size=40,
    )
)
def test_any_text_survives_the_demo_models_tokenizer(demo: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


TOKENS = [*"abcd", "Ġ", "ab", "<s>", "</s>", "<think>"]


def write_gguf(path: Path, arch: str = "llama", **changes: object) -> Path:
    """A model of one layer in the shape of llama.cpp's files; `changes` replace metadata."""
    hidden, heads, kv_heads, rows = 64, 4, 2, len(TOKENS)
    writer = GGUFWriter(path, arch)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(96)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model(str(changes.get("model", "gpt2")))
    writer.add_tokenizer_pre(str(changes.get("pre", "llama-bpe")))
    writer.add_token_list(TOKENS)
    kinds = [TokenType.NORMAL] * 6 + [TokenType.CONTROL] * 2 + [TokenType.USER_DEFINED]
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(6)
    writer.add_eos_token_id(7)
    shapes = {
        "token_embd": (rows, hidden),
        "output": (rows, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (hidden // 2, hidden),
        "blk.0.attn_v": (hidden // 2, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (96, hidden),
        "blk.0.ffn_up": (96, hidden),
        "blk.0.ffn_down": (hidden, 96),
    }
    random = np.random.default_rng(0)
    kind = GGMLQuantizationType[str(changes.get("quantisation", "Q8_0"))]
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, dtype=np.float32))
    if isinstance(divisors := changes.get("rope_freqs"), np.ndarray):
        writer.add_tensor("rope_freqs.weight", divisors)
    if name := changes.get("extra_tensor"):
        writer.add_tensor(str(name), np.ones(hidden, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("quantisation", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_a_gguf_of_a_known_family_and_quantisation_becomes_a_directory(
    tmp_path: Path, cache: Path, arch: str, quantisation: str
) -> None:
    file = write_gguf(tmp_path / f"Tiny-1B.{quantisation}.gguf", arch, quantisation=quantisation)
    out = resolve(str(file), progress=False)
    assert out.name == public_name(str(file)) == "tiny-1b"
    tensors = load_file(out / "model.safetensors")
    stored = {"BF16": torch.bfloat16, "F32": torch.float32}.get(quantisation, torch.float16)
    raw = next(t for t in GGUFReader(file).tensors if t.name == "blk.0.attn_k.weight")
    plain = write_gguf(tmp_path / "plain.gguf", arch, quantisation="F32")
    exact = next(t for t in GGUFReader(plain).tensors if t.name == raw.name).data
    order = unpermuted(32, 2) if arch == "llama" else np.arange(32)
    found = tensors["model.layers.0.self_attn.k_proj.weight"]
    assert found.dtype == stored
    assert tensors["model.norm.weight"].dtype == torch.float32
    torch.testing.assert_close(found.float(), torch.tensor(exact[order]), atol=0.3, rtol=0)
    assert "attention_bias" not in json.loads((out / "config.json").read_text()) or arch == "llama"


def test_special_tokens_and_bos_are_as_the_file_says(tmp_path: Path, cache: Path) -> None:
    out = resolve(str(write_gguf(tmp_path / "m.gguf")), progress=False)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("ab<think>c</s>").tokens == ["<s>", "ab", "<think>", "c", "</s>"]
    assert tokenizer.decode([6, 5, 8, 2, 7]) == "ab<think>c"


def test_llama3_scaling_is_found_again_from_its_divisors(tmp_path: Path, cache: Path) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama import LlamaConfig

    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=scaling)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** -(torch.arange(8) / 8)
    divisors = (plain / frequencies).numpy()
    out = resolve(str(write_gguf(tmp_path / "m.gguf", rope_freqs=divisors)), progress=False)
    found = json.loads((out / "config.json").read_text())["rope_scaling"]
    assert found == {key: value for key, value in scaling.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"arch": "gemma3"}, "family 'gemma3'.*llama, mistral, qwen2, qwen3"),
        ({"model": "llama"}, "tokenizer of the type 'llama'"),
        ({"pre": "tekken"}, "splits text by 'tekken'"),
        ({"extra_tensor": "blk.0.ffn_exps.weight"}, "belongs to no family"),
        ({"rope_freqs": np.linspace(1, 9, 8, dtype=np.float32)}, "rope_freqs unlike"),
    ],
)
def test_a_gguf_that_cannot_be_served_is_one_line_and_leaves_no_directory(
    tmp_path: Path, cache: Path, changes: dict[str, str], line: str
) -> None:
    file = write_gguf(tmp_path / "m.gguf", **changes)
    with pytest.raises(CheckpointError, match=line) as caught:
        resolve(str(file), progress=False)
    assert "\n" not in str(caught.value)
    assert not list(cache.rglob(MANIFEST))


@pytest.mark.parametrize("keep", [0, 10, 1000, -100])
def test_a_gguf_that_is_cut_short_is_one_line(tmp_path: Path, cache: Path, keep: int) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="is no GGUF file, or is cut short"):
        resolve(str(file), progress=False)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", MANIFEST])
def test_a_damaged_conversion_is_made_anew(tmp_path: Path, cache: Path, name: str) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    out = resolve(str(file), progress=False)
    whole = (out / name).read_bytes()
    (out / name).write_bytes(whole[:20])
    out.with_name(f".{out.name}.part").mkdir()  # as a process that was killed leaves it
    assert resolve(str(file), progress=False) == out
    assert (out / name).read_bytes() == whole


def test_two_processes_that_convert_at_once_give_one_whole_directory(
    tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    code = "import sys; from forebay_worker.checkpoint import resolve; print(resolve(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(file)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    places = {process.communicate(timeout=PATIENCE_S)[0].strip() for process in both}
    assert places == {str(resolve(str(file), progress=False))}
    assert len(list(cache.rglob("config.json"))) == 1


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer.json"),
        ("model.safetensors", "has no weights"),
    ],
)
def test_a_directory_that_lacks_a_file_is_told_which(
    tmp_path: Path, cache: Path, broken: str, line: str
) -> None:
    out = shutil.copytree(
        resolve(str(write_gguf(tmp_path / "m.gguf")), progress=False), tmp_path / "copy"
    )
    assert resolve(str(out)) == out
    (out / broken).unlink()
    with pytest.raises(CheckpointError, match=line):
        resolve(str(out))


def test_a_directory_for_random_weights_needs_none(tmp_path: Path, cache: Path) -> None:
    out = shutil.copytree(
        resolve(str(write_gguf(tmp_path / "m.gguf")), progress=False), tmp_path / "copy"
    )
    for file in out.glob("*.safetensors*"):
        file.unlink()
    assert resolve(str(out), weights=False) == out
    with pytest.raises(CheckpointError, match="has no weights"):
        resolve(str(out))


def test_weights_cut_short_and_missing_shards_are_told(tmp_path: Path, cache: Path) -> None:
    out = shutil.copytree(
        resolve(str(write_gguf(tmp_path / "m.gguf")), progress=False), tmp_path / "copy"
    )
    weights = out / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:-1], whole[:100], b"version https://git-lfs.github.com/spec/v1\n"):
        weights.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cut short|broken"):
            resolve(str(out))
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks model-00001-of-00002"):
        resolve(str(out))


def test_a_name_that_is_nothing_says_what_a_model_may_be(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a directory"):
        resolve("no such thing")
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(str(tmp_path / "none.gguf"))


def test_a_hub_id_without_a_network_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="the hub cannot be reached") as caught:
        resolve("org/no-such-model")
    assert "\n" not in str(caught.value)
