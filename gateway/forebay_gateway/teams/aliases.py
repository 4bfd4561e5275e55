"""Which served model answers to a public name: the one that an alias draws, then its fallbacks.

The one place that knows, for every dialect. Pure: the alias, the cards of the fleet and the lot are
given. It knows no caller, no HTTP and no Redis.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Protocol

from forebay_shared.errors import (
    ContextLengthError,
    DeadlineError,
    DrainingError,
    ForebayError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    WorkerLostError,
)
from forebay_shared.models import ModelCard
from forebay_shared.settings import StartError

from forebay_gateway.teams.records import Alias, Condition, Target

_CONDITIONS: Mapping[type[ForebayError], Condition] = {
    NoWorkerError: "missing",
    WorkerLostError: "missing",
    DrainingError: "missing",
    OverloadedError: "overloaded",
    DeadlineError: "overloaded",
    ContextLengthError: "context",
}
FellBack = Callable[[Condition], None]


class Cards(Protocol):
    """roster.Roster: the models of the fleet."""

    def find(self, name: str) -> ModelCard: ...

    def serves(self, card: ModelCard) -> bool:
        """Whether a worker takes requests for it now."""
        ...


class Route:
    """One request's way: a public name, and the served models that may answer to it, in order.

    `lot`, in [0, 1), says which target is drawn; the way stays the same however the alias changes
    meanwhile. `fell_back` hears why the next model is taken.
    """

    __slots__ = ("_at", "_cards", "_fell_back", "_longer_than", "_models", "alias", "name")

    def __init__(
        self, cards: Cards, name: str, alias: Alias | None, lot: float, fell_back: FellBack
    ) -> None:
        self.name = name
        self.alias = alias
        self._cards = cards
        self._models = order(alias, lot) if alias is not None else (name,)
        self._fell_back = fell_back
        self._at = 0
        self._longer_than = 0

    def card(self) -> ModelCard:
        """The card of the model that is to answer now.

        Raises:
            ModelNotFoundError: there is neither an alias nor a model of this name.
            NoWorkerError: nobody serves it now.
        """
        if self.alias is None:
            return self._cards.find(self.name)
        card = self._known(self._at)
        if card is None or not self._cards.serves(card):
            following = self._following("missing")
            if following is not None:
                self._go_on(following, "missing")
                card = self._known(following)
        if card is None:
            raise NoWorkerError(
                "No worker serves this model now. Please retry.", param="model", retry_after_s=2.0
            )
        return card

    def leads_on(self, error: ForebayError) -> bool:
        """Whether another model may answer where the present one failed so."""
        return self._after(error) is not None

    def go_on(self, error: ForebayError) -> bool:
        """Takes the next model after an error; False when there is none that may answer."""
        following = self._after(error)
        if following is None:
            return False
        self._go_on(following, _CONDITIONS[type(error)])
        return True

    def _after(self, error: ForebayError) -> int | None:
        condition = _CONDITIONS.get(type(error))
        return self._following(condition) if condition is not None else None

    def _following(self, condition: Condition) -> int | None:
        """The next model that could do better under a condition, if the alias goes on in it."""
        if self.alias is None or condition not in self.alias.fall_back_on:
            return None
        least = self._longer_than
        if condition == "context" and (card := self._known(self._at)) is not None:
            least = max(least, card.max_model_len)
        for at in range(self._at + 1, len(self._models)):
            card = self._known(at)
            if card is not None and self._cards.serves(card) and card.max_model_len > least:
                return at
        return None

    def _go_on(self, at: int, condition: Condition) -> None:
        card = self._known(self._at)
        if condition == "context" and card is not None:
            self._longer_than = card.max_model_len
        self._at = at
        self._fell_back(condition)

    def _known(self, at: int) -> ModelCard | None:
        try:
            return self._cards.find(self._models[at])
        except (ModelNotFoundError, NoWorkerError):
            return None


def order(alias: Alias, lot: float) -> tuple[str, ...]:
    """The served models as they are asked: the target that the lot draws, then the fallbacks."""
    return tuple(dict.fromkeys((draw(alias.targets, lot), *alias.fallbacks)))


def draw(targets: Sequence[Target], lot: float) -> str:
    """The model that a lot in [0, 1) falls on; each has its weight's share of the lots."""
    weighted = [target for target in targets if target.weight > 0]
    at = lot * sum(target.weight for target in weighted)
    for target in weighted:
        at -= target.weight
        if at < 0:
            return target.model
    return weighted[-1].model


def known_cards(alias: Alias, cards: Cards) -> Iterator[ModelCard]:
    """The cards of its targets as far as they are known; of its fallbacks where none is."""
    targets = [target.model for target in alias.targets if target.weight > 0]
    for names in (targets, alias.fallbacks):
        found = False
        for name in names:
            try:
                card = cards.find(name)
            except (ModelNotFoundError, NoWorkerError):
                continue
            found = True
            yield card
        if found:
            return


def is_withdrawn(alias: Alias, now: float) -> bool:
    return bool(alias.sunset) and alias.sunset <= _day(now)


def notices(alias: Alias, now: float) -> list[tuple[bytes, bytes]]:
    """The headers that say that a name will go (RFC 9745 and 8594), and a warning once it is time.

    They hold no name: it may be of any characters.
    """
    headers: list[tuple[bytes, bytes]] = []
    if alias.deprecated:
        headers.append((b"deprecation", b"@%d" % _midnight(alias.deprecated)))
    if alias.sunset:
        headers.append((b"sunset", formatdate(_midnight(alias.sunset), usegmt=True).encode()))
    if alias.deprecated and alias.deprecated <= _day(now):
        ending = f" and will be withdrawn on {alias.sunset}" if alias.sunset else ""
        headers.append(warning(f"This model is deprecated since {alias.deprecated}{ending}."))
    return headers


def warning(text: str) -> tuple[bytes, bytes]:
    """A header that people see in their logs. `text` is ASCII without quotes."""
    return b"warning", b'299 - "%b"' % text.encode("ascii")


def configured(pairs: Sequence[str]) -> list[Alias]:
    """Aliases of `name=model` texts, as `--alias` has them. Raises StartError."""
    found: dict[str, Alias] = {}
    for pair in pairs:
        name, equals, model = (part.strip() for part in pair.partition("="))
        if not (name and equals and model):
            raise StartError("--alias: must be NAME=MODEL, such as gpt-4o=smollm2-135m-instruct")
        if name in found:
            raise StartError(f"--alias: {name} is there twice")
        found[name] = Alias(id=name, targets=(Target(model),))
    for name, alias in found.items():
        if (model := alias.targets[0].model) in found:
            raise StartError(f"--alias {name}={model}: {model} is an alias; name a served model")
    return list(found.values())


def _day(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))


def _midnight(day: str) -> float:
    return datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
