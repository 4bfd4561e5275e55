"""Aliases: which model a name draws, what follows it, and what the name makes of parameters."""

from collections import Counter

import pytest
from forebay_gateway.api.openai.bounds import bounded
from forebay_gateway.api.openai.schema import ChatRequest, CompletionRequest, Message
from forebay_gateway.teams.aliases import (
    Route,
    configured,
    draw,
    is_withdrawn,
    notices,
    order,
)
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.catalog import Catalog
from forebay_gateway.teams.checks import parse
from forebay_gateway.teams.directory import Directory, decoded, encode
from forebay_gateway.teams.records import (
    Alias,
    Caps,
    Condition,
    Defaults,
    Entry,
    Model,
    Target,
    place_of,
)
from forebay_shared.errors import (
    BusError,
    ContextLengthError,
    DeadlineError,
    DrainingError,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
    RateLimitError,
    WorkerLostError,
)
from forebay_shared.models import CAP_EMBED, CAP_GENERATE, Adapter, ModelCard
from forebay_shared.settings import GatewaySettings, StartError
from gateway_fakes import MODEL, running_api
from hypothesis import given
from hypothesis import strategies as st
from teams_house import NOW

DAY = "2027-01-15"  # of NOW


def card(*names: str, length: int = 100, **fields) -> ModelCard:
    known = {"revision": "r", "family": "f", "engine": "e", "tokenizer": "t", "vocab_size": 9}
    return ModelCard(
        names=names, max_model_len=length, block_size=16, created=1, **{**known, **fields}
    )


class Fleet:
    """Cards by name; those in `away` have no worker now."""

    def __init__(self, *cards: ModelCard) -> None:
        self.known = list(cards)
        self.away: set[str] = set()

    def cards(self) -> list[ModelCard]:
        return self.known

    def find(self, name: str) -> ModelCard:
        for each in self.known:
            if name in each.names:
                return each
        raise ModelNotFoundError("no")

    def serves(self, card: ModelCard) -> bool:
        return card.name not in self.away


def alias(name: str = "fast", *targets: str, **fields) -> Alias:
    chosen = tuple(Target(model) for model in targets or ("a",))
    return Alias(id=name, **{"targets": chosen, **fields})


def directory(*entries: Entry, flags: tuple[str, ...] = ()) -> Directory:
    found = Directory(configured(flags))
    found.replace(1, decoded((place_of(entry), f"1 {encode(entry)}") for entry in entries))
    return found


def route(fleet: Fleet, one: Alias, lot: float = 0.0) -> tuple[Route, list[Condition]]:
    heard: list[Condition] = []
    return Route(fleet, one.public_name, one, lot, heard.append), heard


weights = st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(lambda all_: sum(all_) > 1e-3)


@given(weights)
def test_each_target_has_its_weights_share_of_the_lots(given_weights: list[float]) -> None:
    targets = [Target(str(at), weight) for at, weight in enumerate(given_weights)]
    number = 4_000
    drawn = Counter(draw(targets, (at + 0.5) / number) for at in range(number))
    for at, weight in enumerate(given_weights):
        assert drawn[str(at)] / number == pytest.approx(weight / sum(given_weights), abs=2e-3)
        assert weight or not drawn[str(at)]


def test_callers_draw_a_canarys_share() -> None:
    """40,000 draws of a share of 0.1: seven standard deviations are 0.0105."""
    one = alias(targets=(Target("a", 9), Target("b", 1)))
    drawn = Counter(order(one, Caller().lot)[0] for _ in range(40_000))
    assert drawn["b"] / 40_000 == pytest.approx(0.1, abs=0.0105)


def test_a_request_keeps_its_model_however_the_alias_changes() -> None:
    fleet = Fleet(card("a"), card("b"))
    records = directory(alias(targets=(Target("a"), Target("b"))))
    catalog, caller = Catalog(fleet, records, lambda _: None), Caller()
    first = catalog.find("fast", caller)
    records.replace(2, decoded([("alias/fast", f"2 {encode(alias('fast', 'c'))}")]))
    assert all(catalog.find("fast", caller) is first for _ in range(20))
    with pytest.raises(NoWorkerError):
        catalog.find("fast", Caller())


def test_a_missing_model_is_followed_by_one_that_is_served() -> None:
    fleet = Fleet(card("a"), card("b"), card("d"))
    one = alias("fast", "a", fallbacks=("b", "c", "d"))
    fleet.away = {"a", "b"}
    found, heard = route(fleet, one)
    assert found.card().name == "d"
    assert heard == ["missing"]
    fleet.away.add("d")
    assert route(fleet, one)[0].card().name == "a"  # it waits for the one that was drawn
    strict = alias("fast", "c", fallbacks=("b",), fall_back_on=("overloaded",))
    fleet.away.clear()
    with pytest.raises(NoWorkerError):
        route(fleet, strict)[0].card()


@pytest.mark.parametrize(
    ("error", "condition"),
    [
        (NoWorkerError, "missing"),
        (WorkerLostError, "missing"),
        (DrainingError, "missing"),
        (OverloadedError, "overloaded"),
        (DeadlineError, "overloaded"),
        (ContextLengthError, "context"),
    ],
)
def test_each_condition_goes_on_only_where_the_alias_says_so(error, condition: Condition) -> None:
    fleet = Fleet(card("a"), card("b", length=200))
    for chosen in (("missing",), ("overloaded",), ("context",), ()):
        one = alias("fast", "a", fallbacks=("b",), fall_back_on=chosen)
        found, heard = route(fleet, one)
        assert found.card().name == "a"
        goes = condition in chosen
        assert found.leads_on(error("x")) == found.go_on(error("x")) == goes
        assert found.card().name == ("b" if goes else "a")
        assert heard == ([condition] if goes else [])
        assert not found.go_on(error("x"))


def test_other_errors_and_plain_names_go_nowhere() -> None:
    fleet = Fleet(card("a"), card("b"))
    found, _ = route(fleet, alias("fast", "a", fallbacks=("b",)))
    for error in (BusError, RateLimitError, InvalidRequestError, ModelNotFoundError):
        assert not found.go_on(error("x"))
    plain = Route(fleet, "a", None, 0.0, lambda _: None)
    assert plain.card().name == "a"
    assert not plain.go_on(OverloadedError("x"))


def test_a_prompt_that_is_too_long_goes_to_a_longer_context_or_nowhere() -> None:
    fleet = Fleet(card("a", length=100), card("b", length=100), card("c", length=300))
    found, _ = route(fleet, alias("fast", "a", fallbacks=("b", "c")))
    assert found.go_on(ContextLengthError("x"))
    assert found.card().name == "c"
    short, _ = route(fleet, alias("fast", "a", fallbacks=("b",)))
    assert not short.go_on(ContextLengthError("x"))
    back, _ = route(fleet, alias("fast", "a", fallbacks=("c", "b")))
    assert back.go_on(ContextLengthError("x"))
    assert not back.go_on(OverloadedError("x"))  # the third is as short as the first


def test_a_teams_alias_shadows_the_one_for_all_and_that_a_flags() -> None:
    own = Alias(id="red/fast", team="red", targets=(Target("own"),))
    records = directory(own, alias("fast", "all"), flags=("fast=flag", "slow=flag"))

    def model(name: str, team: str) -> str:
        found = records.alias(name, team)
        return found.targets[0].model if found else ""

    assert model("fast", "red") == "own"
    assert model("fast", "blue") == model("fast", "") == "all"
    assert model("slow", "red") == "flag"
    assert model("red/fast", "") == model("red/fast", "red") == ""
    seen = {name: one.targets[0].model for name, one in records.aliases("red").items()}
    assert seen == {"fast": "own", "slow": "flag"}
    assert directory(alias("red/fast", "all")).alias("fast", "red") is None


def test_a_list_of_models_has_aliases_in_place_of_what_they_shadow() -> None:
    fleet = Fleet(
        card("a", "x", length=100, capabilities=frozenset({CAP_GENERATE, CAP_EMBED})),
        card("b", length=50, capabilities=frozenset({CAP_GENERATE})),
    )
    records = directory(
        alias("x", "a", "b"),
        alias("gone", "nothing"),
        alias("back", "nothing", fallbacks=("b",), deprecated="2020-01-01"),
        alias("off", "a", disabled=True),
        alias("over", "a", sunset="2020-01-01"),
    )
    catalog = Catalog(fleet, records, lambda _: None)
    listed = {entry.name: entry for entry in catalog.list(Caller())}
    assert list(listed) == ["a", "b", "back", "x"]
    assert (listed["x"].max_model_len, listed["x"].capabilities) == (50, {CAP_GENERATE})
    for name in ("off", "over"):
        with pytest.raises(ModelNotFoundError):
            catalog.find(name, Caller())
    with pytest.raises(NoWorkerError):
        catalog.find("gone", Caller())


def test_an_alias_that_hides_a_served_model_or_adapter_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = card("a", "x", adapters=(Adapter("sql", "1f"), Adapter("law", "2f")))
    records = directory(
        alias("x", "b"),
        alias("a", "b", "a"),  # a canary of its own name
        alias("law", "b", disabled=True),
        Alias(id="red/a", team="red", targets=(Target("b"),)),
        flags=("sql=b",),
    )
    Catalog(Fleet(served), records, lambda _: None).meet(served)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "the alias x hides the served model of that name",
        "the alias sql hides the served model of that name",
    ]


def test_what_is_deprecated_says_so_in_headers() -> None:
    soon = alias(deprecated="2027-02-01", sunset="2027-03-01")
    assert notices(soon, NOW) == [
        (b"deprecation", b"@1801440000"),
        (b"sunset", b"Mon, 01 Mar 2027 00:00:00 GMT"),
    ]
    now = notices(alias(deprecated=DAY), NOW)
    assert now[1] == (b"warning", b'299 - "This model is deprecated since 2027-01-15."')
    assert not notices(alias(), NOW)
    assert is_withdrawn(alias(sunset=DAY), NOW)
    assert not is_withdrawn(alias(sunset="2027-01-16"), NOW)


def chat(**fields) -> ChatRequest:
    return ChatRequest(model="fast", messages=[Message("user", "hi")], **fields)


def test_defaults_fill_what_the_client_left_out() -> None:
    defaults = Defaults(max_tokens=5, temperature=0.3, top_k=7, presence_penalty=0.5)
    one, told = alias(defaults=defaults), []
    filled = bounded(chat(), one, card("a"), told)
    assert (filled.max_tokens, filled.temperature, filled.top_k) == (5, 0.3, 7)
    assert filled.presence_penalty == 0.5
    kept = bounded(chat(max_completion_tokens=9, temperature=0.0), one, card("a"), told)
    assert (kept.max_completion_tokens, kept.max_tokens, kept.temperature) == (9, None, 0.0)
    assert not told
    same = chat(max_tokens=1)
    assert bounded(same, alias(), card("a"), told) is same


def test_caps_lower_what_is_above_them_and_say_so() -> None:
    one, told = alias(caps=Caps(max_tokens=10, temperature=0.5, top_p=0.9)), []
    lowered = bounded(chat(max_completion_tokens=50, temperature=2), one, card("a"), told)
    assert (lowered.max_tokens, lowered.max_completion_tokens) == (10, None)
    assert (lowered.temperature, lowered.top_p) == (0.5, 0.9)
    assert told == [
        (b"warning", b'299 - "max_tokens was lowered to 10, the most for this model."'),
        (b"warning", b'299 - "temperature was lowered to 0.5, the most for this model."'),
    ]
    again = bounded(chat(max_completion_tokens=50, temperature=2), one, card("a"), told)
    assert again == lowered
    assert len(told) == 2
    below = bounded(chat(max_tokens=3, temperature=0.1, top_p=0.5), one, card("a"), [])
    assert (below.max_tokens, below.temperature, below.top_p) == (3, 0.1, 0.5)


def test_caps_hold_for_what_a_model_would_do_by_itself() -> None:
    one = alias(caps=Caps(max_tokens=10, temperature=0.5))
    calm = card("a", generation_defaults={"temperature": 0.2, "max_tokens": 4})
    assert bounded(chat(), one, calm, []) == chat()
    hot = bounded(chat(), one, card("a", generation_defaults={"temperature": 0.7}), [])
    assert (hot.max_tokens, hot.temperature) == (10, 0.5)
    text = CompletionRequest(model="fast", prompt="x")
    assert bounded(text, one, calm, []).max_tokens == 10  # it would be 16
    assert bounded(text, alias(caps=Caps(max_tokens=20)), calm, []).max_tokens is None
    echoed = CompletionRequest(model="fast", prompt="x", max_tokens=0, echo=True)
    assert bounded(echoed, one, calm, []).max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"team": "red", "id": "fast"}, "x.id must begin with red/"),
        ({"team": "red", "id": "red/"}, "x.id must hold a name"),
        ({"id": "a\nb"}, "x.id"),
        ({"targets": [{"model": "m"}, {"model": "m"}]}, "x.targets must name each model once"),
        ({"fall_back_on": ["full"]}, r"x.fall_back_on\[0\]"),
        ({"defaults": {"max_tokens": 9}, "caps": {"max_tokens": 8}}, "x.defaults.max_tokens"),
        ({"defaults": {"stop": ["x"]}}, "x.defaults.stop is not a field"),
        ({"limits": {"tokens_per_day": 5}}, "x.limits"),
        ({"budgets": [{"amount": 5}]}, "x.budgets"),
        ({"deprecated": "2027-02-30"}, "x.deprecated must be a date"),
        ({"deprecated": "2027-02-02", "sunset": "2027-02-01"}, "x.sunset must not be before"),
    ],
)
def test_a_bad_alias_is_refused_by_its_field(fields, named: str) -> None:
    tree = {"id": "fast", "targets": [{"model": "m"}], **fields}
    with pytest.raises(InvalidRequestError, match=named):
        parse("alias", tree, "x")


def test_an_alias_needs_models_that_are_there() -> None:
    records = directory(Model(id="described"), alias("fast", "described"), alias("slow", "served"))

    def missing(changes: dict[str, Entry | None]) -> str:
        found = records.missing_model(changes, lambda name: name == "served")
        return found[1] if found else ""

    def writes(one: Alias) -> dict[str, Entry | None]:
        return {place_of(one): one}

    assert not missing(writes(alias("new", "served", fallbacks=("described",))))
    assert missing(writes(alias("new", "served", fallbacks=("none",)))) == "none"
    assert missing(writes(alias("new", "fast"))) == "fast"
    assert missing(writes(alias("new", "new"))) == "new"
    assert missing({"model/described": None}) == "described"
    assert not missing({"model/described": None, "alias/fast": None})
    assert not missing({"model/new": Model(id="new"), **writes(alias("x", "new"))})


@pytest.mark.parametrize("pair", ["a", "=a", "a=", "a=a", ""])
def test_a_flag_that_is_no_alias_stops_the_start(pair: str) -> None:
    with pytest.raises(StartError, match="--alias"):
        configured([pair])
    for pairs in (["a=b", "a=c"], ["a=b", "b=c"], ["a=b", "b=a"]):
        with pytest.raises(StartError):
            configured(pairs)


def test_a_flags_alias_works_without_teams() -> None:
    with running_api(settings=GatewaySettings(alias=(f"gpt-x={MODEL}",))) as api:
        answer = api.chat(model="gpt-x", max_tokens=3)
        assert answer.json()["model"] == "gpt-x"
        assert [model["id"] for model in api.http.get("/v1/models").json()["data"]][-1] == "gpt-x"
        shown = api.http.get("/v1/models/gpt-x").json()
        assert (shown["id"], shown["max_model_len"]) == ("gpt-x", 512)
        assert "deprecation" not in shown
        assert api.http.get("/v1/models/gpt-y").status_code == 404
