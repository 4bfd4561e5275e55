"""Composes the output of a response from the updates of a transcript, and says each step as events.

The items are the same whether anybody listens to the events or not: so a streamed response and a
plain one are equal. It knows no HTTP and no Redis.
"""

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from forebay_gateway.api.openai.logprobs import ChatLogprobs, TokenEntry
from forebay_gateway.api.responses.custom import InputReader
from forebay_gateway.api.responses.items import item_id
from forebay_gateway.api.responses.sealed import seal
from forebay_gateway.api.responses.shapes import (
    CallItem,
    CustomCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from forebay_gateway.api.responses.tools import Callee
from forebay_gateway.api.transcript import Update
from forebay_gateway.parts import CallArguments, CallEnd, CallStart, Part, Reasoning, Text

encode = msgspec.json.Encoder().encode

Events: TypeAlias = list[bytes]
"""Whole events, each ready to be sent: its place in the list is its place in the stream."""


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None = None


def error_event(sequence: int, code: str, message: str) -> bytes:
    """The event that ends a stream which cannot say how the response ended."""
    members = encode(_Error(code, message))[1:]
    return b'event: error\ndata: {"type":"error","sequence_number":%d,%b\n\n' % (sequence, members)


def lifecycle_event(name: str, sequence: int, response: bytes) -> bytes:
    """An event that holds the whole response."""
    return _event(f"response.{name}", sequence, b'"response":%b' % response)


def _event(kind: str, sequence: int, members: bytes) -> bytes:
    name = kind.encode()
    return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (
        name,
        name,
        sequence,
        members,
    )


class Composer:
    """One response's output in the making. `logprobs` lists the tokens, where they are wanted;
    `callees` are the client's tools by the names of the functions that they are for the model;
    `seals`: reasoning has its `encrypted_content`.

    `sequence` is the number of the next event.
    """

    def __init__(
        self,
        response_id: str,
        logprobs: ChatLogprobs | None = None,
        callees: Mapping[str, Callee] = {},
        *,
        seals: bool = False,
    ) -> None:
        self._response_id = response_id
        self._seals = seals
        self._logprobs = logprobs
        self._callees = callees
        self._input = InputReader()
        self._tokens: list[TokenEntry] = []
        self._pieces: list[str] = []
        self._open: OutputItem | None = None
        self._place = b""
        self.items: list[OutputItem] = []
        self.sequence = 0

    def event(self, kind: str, members: bytes) -> bytes:
        """The next event; `members` are those of its JSON behind type and number."""
        self.sequence += 1
        return _event(kind, self.sequence - 1, members)

    def push(self, update: Update) -> Events:
        """Takes in what came; the events of it."""
        if self._logprobs is not None and update.token_ids:
            self._tokens += self._logprobs.tokens(update)
        events: Events = []
        if update.text:
            self._take(Text(update.text), events)
        cut = update.reason == "length"
        for part in update.parts:
            if not (cut and isinstance(part, CallEnd)):  # what ends with the text was cut off
                self._take(part, events)
        if update.reason is not None:
            self._list_rest()
            self._end(cut, events)
        return events

    def snapshot(self) -> list[OutputItem]:
        """The items so far, for an answer that breaks off: what is open counts as incomplete."""
        if self._open is not None:
            self._fill(self._open, "incomplete")
        return self.items

    def _take(self, part: Part, events: Events) -> None:
        match part:
            case Text():
                self._speak(part.text, events)
            case Reasoning():
                self._think(part.text, events)
            case CallStart():
                self._begin(self._call(part), events)
            case CallArguments():
                self._argue(part.text, events)
            case CallEnd():
                self._close("completed", events)
        self._tokens.clear()

    def _call(self, part: CallStart) -> CallItem | CustomCallItem:
        callee = self._callees.get(part.name) or Callee(part.name)
        kind, type_ = "function_call", CallItem
        if callee.custom:
            kind, type_ = "custom_tool_call", CustomCallItem
            self._input = InputReader()
        item = type_(self._new_id(kind), "in_progress", part.id, callee.name)
        item.namespace = callee.namespace or msgspec.UNSET
        return item

    def _speak(self, text: str, events: Events) -> None:
        message = self._message(events)
        self._pieces.append(text)
        logprobs = b"[]"
        if self._tokens:
            tokens = self._spelling(text)
            message.content[0].logprobs += tokens
            logprobs = encode(tokens)
        members = b'%b,"content_index":0,"delta":%b,"logprobs":%b' % (
            self._place,
            encode(text),
            logprobs,
        )
        events.append(self.event("response.output_text.delta", members))

    def _spelling(self, text: str) -> list[TokenEntry]:
        """The latest tokens that spell a text; those before them were markup, such as a tag."""
        missing, first = len(text.encode()), len(self._tokens)
        while first > 0 and missing > 0:
            first -= 1
            missing -= len(self._tokens[first].bytes)
        return self._tokens[first:]

    def _list_rest(self) -> None:
        """Tokens of a text that went out before it was known that no more of them is said."""
        if isinstance(self._open, MessageItem):
            self._open.content[0].logprobs += self._tokens
        self._tokens.clear()

    def _message(self, events: Events) -> MessageItem:
        """The open message, begun if need be."""
        item = self._open
        if not isinstance(item, MessageItem):
            item = MessageItem(self._new_id("message"), "in_progress", [])
            self._begin(item, events)
            item.content.append(OutputText())
            events.append(self._part_event("added", item.content[0]))
        return item

    def _think(self, text: str, events: Events) -> None:
        item = self._open
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(self._new_id("reasoning"), "in_progress", [])
            self._begin(item, events)
            item.content.append(ReasoningText())
            events.append(self._part_event("added", item.content[0]))
        self._pieces.append(text)
        members = b'%b,"content_index":0,"delta":%b' % (self._place, encode(text))
        events.append(self.event("response.reasoning_text.delta", members))

    def _argue(self, text: str, events: Events) -> None:
        item = self._open
        if isinstance(item, CallItem):
            self._write("response.function_call_arguments.delta", text, events)
        elif isinstance(item, CustomCallItem):
            self._write("response.custom_tool_call_input.delta", self._input.push(text), events)

    def _write(self, kind: str, text: str, events: Events) -> None:
        """A piece of what a call is called with, when there is one."""
        if text:
            self._pieces.append(text)
            events.append(self.event(kind, b'%b,"delta":%b' % (self._place, encode(text))))

    def _begin(self, item: OutputItem, events: Events) -> None:
        self._close("completed", events)
        self._open = item
        self.items.append(item)
        self._place = b'"item_id":"%b","output_index":%d' % (item.id.encode(), self._index)
        members = b'"output_index":%d,"item":%b' % (self._index, encode(item))
        events.append(self.event("response.output_item.added", members))

    def _end(self, cut: bool, events: Events) -> None:
        """The answer is over. One without a word is an empty message, so that there is one."""
        if not self.items and not cut:
            self._message(events)
        self._close("incomplete" if cut else "completed", events)

    def _close(self, status: ItemStatus, events: Events) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if isinstance(item, CustomCallItem) and status == "completed":
            self._write("response.custom_tool_call_input.delta", self._input.finish(), events)
        self._fill(item, status)
        if isinstance(item, MessageItem | ReasoningItem):
            events += self._text_done(item)
        else:
            events.append(self._call_done(item))
        members = b'"output_index":%d,"item":%b' % (self._index, encode(item))
        events.append(self.event("response.output_item.done", members))

    def _call_done(self, item: CallItem | CustomCallItem) -> bytes:
        if isinstance(item, CallItem):
            said = self._place, encode(item.name), encode(item.arguments)
            members = b'%b,"name":%b,"arguments":%b' % said
            return self.event("response.function_call_arguments.done", members)
        members = b'%b,"input":%b' % (self._place, encode(item.input))
        return self.event("response.custom_tool_call_input.done", members)

    def _text_done(self, item: MessageItem | ReasoningItem) -> Events:
        """The events that end the one part of a text."""
        part = item.content[0]
        members = b'%b,"content_index":0,"text":%b' % (self._place, encode(part.text))
        kind = "response.reasoning_text.done"
        if isinstance(part, OutputText):
            kind = "response.output_text.done"
            members += b',"logprobs":%b' % encode(part.logprobs)
        return [self.event(kind, members), self._part_event("done", part)]

    def _fill(self, item: OutputItem, status: ItemStatus) -> None:
        """Gives an item the text that has come for it."""
        text = "".join(self._pieces)
        self._pieces.clear()
        item.status = status
        match item:
            case CallItem():
                item.arguments += text
            case CustomCallItem():
                item.input += text
            case MessageItem():
                item.content[0].text += text
            case ReasoningItem():
                item.content[0].text += text
                if self._seals:
                    item.encrypted_content = seal(item.content[0].text)

    def _part_event(self, kind: str, part: OutputText | ReasoningText) -> bytes:
        members = b'%b,"content_index":0,"part":%b' % (self._place, encode(part))
        return self.event(f"response.content_part.{kind}", members)

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _new_id(self, kind: str) -> str:
        return item_id(self._response_id, kind, len(self.items))
