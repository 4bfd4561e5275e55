"""Text, thinking and tool calls out of token ids: is the 60,000th token as cheap as the first?

    python benchmarks/per_token.py [--tokens 60000]

One answer of so many tokens, of the demo model's tokenizer, is pushed a token at a time, as a
stream of it would be. Figures are microseconds of processor time per token in the first and the
last tenth; `growth` is their ratio, 1 where the work for a token does not depend on those before.
The tool parsers read one call whose only argument is that long. `window` is the way of tokenizers
that are not byte-level.
"""

import time
from collections.abc import Callable, Sequence

import common
from forebay_gateway.output import Output, OutputOptions, Vocabulary
from forebay_gateway.reasoning.base import Opened, ReasoningParser
from forebay_gateway.speech import Speech
from forebay_gateway.tools.base import Tool
from forebay_gateway.tools.deepseek_v3 import CALL_BEGIN, CALLS_BEGIN, SEPARATOR
from forebay_gateway.tools.registry import BUILT_IN
from forebay_worker.checkpoint import resolve
from tokenizers import Tokenizer

PARTS = 10
OPENINGS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"text": "',
    "llama3_json": '{"name": "f", "parameters": {"text": "',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"text": "',
    "pythonic": '[f(text="',
    "deepseek_v3": f'{CALLS_BEGIN}{CALL_BEGIN}f{SEPARATOR}{{"text": "',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=text>\n",
}
"""How each family begins a call; what follows is its argument."""
WORDS = (
    "The river rises slowly, and \\u00e9 stands for é; 17 boats wait < below > the [old] bridge. "
)

Reader = Callable[[Vocabulary], Output | Speech]


class _Windowed(Vocabulary):
    """The same vocabulary, read as one that has no table of bytes."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        super().__init__(tokenizer, size)
        self.byte_level = False


def readers() -> dict[str, tuple[str, Reader]]:
    """By case: how the answer begins, and who reads it."""

    def plain(options: OutputOptions) -> Reader:
        return lambda vocabulary: Output(vocabulary, options)

    def calls(family: str) -> Reader:
        tool = Tool("f", parameters={"type": "object", "properties": {"text": {"type": "string"}}})
        return lambda vocabulary: Speech(
            vocabulary, OutputOptions(), tools=BUILT_IN[family]((tool,))
        )

    stops = OutputOptions(stops=("\n\nUser:", "<|end|>", "bridge!", "river rises fast"))
    found: dict[str, tuple[str, Reader]] = {
        "text": ("", plain(OutputOptions())),
        "window": ("", plain(OutputOptions())),
        "stop strings": ("", plain(stops)),
        "thinking": (
            "",
            lambda vocabulary: Speech(
                vocabulary, OutputOptions(), reasoning=ReasoningParser(Opened.YES)
            ),
        ),
    }
    return found | {name: (opening, calls(name)) for name, opening in OPENINGS.items()}


def measure(reader: Output | Speech, token_ids: Sequence[int]) -> common.Figures:
    part = len(token_ids) // PARTS
    taken: list[float] = []
    for at in range(0, part * PARTS, part):
        began = time.process_time()
        for token_id in token_ids[at : at + part]:
            reader.push((token_id,))
        taken.append((time.process_time() - began) / part * 1e6)
    if isinstance(reader, Speech) and reader.reasoning_tokens is None and reader.calls != 1:
        raise SystemExit("the call was not read as one")
    return {"first us": taken[0], "last us": taken[-1], "growth": taken[-1] / taken[0]}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, default=60_000, help="default: %(default)s")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(resolve("") / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    tables = {"window": _Windowed(tokenizer, size)}
    usual = Vocabulary(tokenizer, size)
    body = tokenizer.encode(WORDS, add_special_tokens=False).ids
    results = common.Results("per_token", options)
    cases = readers()

    def run(case: str, turn: int) -> common.Figures:
        opening, reader = cases[case]
        ids = tokenizer.encode(opening, add_special_tokens=False).ids
        ids += body * (options.tokens // len(body) + 1)
        return measure(reader(tables.get(case, usual)), ids[: options.tokens])

    found = common.in_turns(options.rounds, list(cases), run)
    results.add(f"{options.tokens} tokens", found, "text")
    results.write()


if __name__ == "__main__":
    main()
