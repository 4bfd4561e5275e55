"""What a client may ask of an engine that speaks text: a conversation or a prompt, as it stands.

The gateway has checked it; the engine gives it to whatever it stands for. Numbers and grammars are
in SamplingParams. It knows no dialect and no model.
"""

import msgspec

Plain = str | int | float | bool | None

BYTES_PER_TOKEN = 4
"""Of most tokenizers and languages; what a text has is told by the engine, afterwards."""
TOKENS_PER_MESSAGE = 4


class AskedCall(msgspec.Struct, frozen=True, array_like=True):
    """A function call in the history; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class AskedMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message. `call_id` is that of the call which a tool's message answers."""

    role: str
    content: str
    name: str = ""
    reasoning: str = ""
    calls: tuple[AskedCall, ...] = ()
    call_id: str = ""

    @property
    def num_bytes(self) -> int:
        calls = sum(len(call.name) + len(call.arguments.encode()) for call in self.calls)
        return len(self.content.encode()) + len(self.reasoning.encode()) + calls


class AskedFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema as text."""

    name: str
    parameters: str
    description: str = ""
    strict: bool = False


class Chat(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="chat"):
    """A conversation.

    Attributes:
        required: some function must be called; `forced` names the one.
        parallel: False: one call at most.
        template: values for the chat template.
        continues: the answer goes on with the last message.
    """

    messages: tuple[AskedMessage, ...]
    functions: tuple[AskedFunction, ...] = ()
    required: bool = False
    forced: str = ""
    parallel: bool = True
    reasoning_effort: str | None = None
    verbosity: str | None = None
    template: dict[str, Plain] = {}
    continues: bool = False

    @property
    def estimated_tokens(self) -> int:
        functions = sum(
            len(each.parameters.encode()) + len(each.description.encode())
            for each in self.functions
        )
        text = sum(message.num_bytes for message in self.messages) + functions
        return _tokens(text) + TOKENS_PER_MESSAGE * len(self.messages)


class Prompt(msgspec.Struct, frozen=True, tag="prompt"):
    """A text to go on with."""

    text: str

    @property
    def estimated_tokens(self) -> int:
        return estimated_tokens(self.text)


Asked = Chat | Prompt


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has, at least 1: for admission, before anybody has counted."""
    return _tokens(len(text.encode()))


def _tokens(num_bytes: int) -> int:
    return max(1, -(-num_bytes // BYTES_PER_TOKEN))
