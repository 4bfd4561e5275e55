"""The process in which a client's grammar is compiled first: `python -m` this module.

What llguidance makes of a hostile source can overflow the stack, take all memory or never end; here
that ends this process alone. Each line on stdin asks for one check, each line on stdout answers.
It compiles over single bytes in place of a vocabulary, so it starts in 0.1 s, and with an eighth of
the stack that the engine has: what passes here is safe there. It knows no model.
"""

import json
import os
import re
import resource
import signal
import sys
import threading
from typing import TYPE_CHECKING, cast

import msgspec
from forebay_shared.sampling import JSON_FORM, Grammar
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CPU_S = 1.0
MEMORY_BYTES = 1 << 30
STACK_BYTES = 1 << 20
READY = b"ready\n"


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammar in llguidance's own form, or what is wrong with it, written for the client."""

    grammar: str = ""
    error: str = ""


def limits() -> LLParserLimits:
    """The bounds of compiling and of each step: about 20 ms of lexer work and 20,000 states."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def check(grammar: Grammar, tokenizer: LLTokenizer) -> Verdict:
    """Compiles `grammar` and takes its first step."""
    try:
        text = translate(grammar)
    except (ValueError, RecursionError) as error:
        return Verdict(error=explain(grammar, str(error)))
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return Verdict(error=explain(grammar, matcher.get_error()))
    return Verdict(grammar=text)


def translate(grammar: Grammar) -> str:
    """A grammar in llguidance's form. Raises ValueError when its source is malformed."""
    match grammar.kind:
        case "json_object":
            return _json_grammar('{"type":"object"}')
        case "json_schema":
            return _json_grammar(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(_regex(grammar.source))
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(grammar.source))
        case "lark":
            return LLMatcher.grammar_from_lark(_lark(grammar.source))


def _json_grammar(schema: str) -> str:
    # All options are said, for a schema's x-guidance could set any that is left out.
    options = cast("JsonCompileOptions", JSON_FORM)
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def _regex(source: str) -> str:
    """Digits and letters are those of ASCII, as in a schema's pattern: a small model that may write
    any of 760 digits does. A backslash at the end, with nothing to escape, is dropped by llguidance
    without a word."""
    if (len(source) - len(source.rstrip("\\"))) % 2:
        raise ValueError("error: incomplete escape sequence")
    return _ESCAPE.sub(lambda found: _ASCII.get(found[0], found[0]), source)


def _choice(source: str) -> str:
    choices = msgspec.json.decode(source, type=list[str])
    if not choices:
        raise ValueError("no choice")
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)


def _lark(source: str) -> str:
    """Lark, also from GBNF. What begins with a brace would be taken for llguidance's own JSON."""
    if source.lstrip().startswith("{"):
        raise ValueError("not Lark")
    return any_to_lark(source)


_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ASCII = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_QUOTED = re.compile(r'"([^"]*)"')
_REGEX_ERROR = re.compile(r"error: ([^\n]{1,120})")
_PLACE = re.compile(r"(?:at )?(\d{1,7})\((\d{1,7})\): ")
_REASONS = (
    (
        "oneOf constraints",
        "the keyword oneOf is supported only where its branches exclude each other; use anyOf",
    ),
    ("Unknown format", "the keyword format has a value that is not supported"),
    ("Invalid type", "the keyword type has an unknown value"),
    ("Pointer ", "a $ref leads nowhere"),
    ("Resource ", "a $ref leads out of the schema"),
    ("Unsatisfiable", "no value satisfies it"),
    ("NoExtension", "no output satisfies it"),
    ("recursion limit", "it is nested too deep"),
    ("too big", "it is too large"),
    ("too large", "it is too large"),
    ("too many", "it is too large"),
    ("too deeply nested", "it is nested too deep"),
    ("lookarounds", "look-around and word boundaries are not supported"),
)
_NAMES = {
    "json_schema": "The JSON schema",
    "json_object": "The JSON schema",
    "regex": "The regular expression",
    "choice": "The list of choices",
    "lark": "The grammar",
}


def explain(grammar: Grammar, error: str) -> str:
    """llguidance's message in plain words: it names the keyword, and quotes nothing else."""
    if grammar.kind == "lark" and grammar.field != "structured_outputs":
        # The gateway wrote it: its lines say nothing to a client.
        name = "The schema of a function" if grammar.field == "tools" else _NAMES["json_schema"]
        return f"{name} cannot be used: {_reason(_PLACE.sub('', error))}."
    return f"{_NAMES[grammar.kind]} cannot be used: {_reason(error)}."


def _reason(error: str) -> str:
    if unknown := _UNKNOWN_KEYS.search(error):
        return f"the keyword {', '.join(_QUOTED.findall(unknown.group(1)))} is not supported"
    for sign, reason in _REASONS:
        if sign in error:
            return reason
    if found := _REGEX_ERROR.search(error):
        return found.group(1)
    if place := _PLACE.match(error):
        return f"there is an error in line {place.group(1)}, column {place.group(2)}"
    return "it is malformed"


class _Bytes:
    """A vocabulary of the 256 bytes and an end token, as llguidance asks for one."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([each]) for each in range(256)), b"<eos>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def _serve() -> None:
    tokenizer = LLTokenizer(_Bytes())  # pyright: ignore[reportArgumentType]  # duck-typed there
    _say(READY)
    for line in sys.stdin.buffer:
        # The default action of SIGPROF ends the process, whatever it is in.
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        verdict = check(msgspec.json.decode(line, type=Grammar), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(msgspec.json.encode(verdict) + b"\n")


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def main() -> None:
    """Serves until stdin ends."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
