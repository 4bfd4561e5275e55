"""What keys open: by secret, parents, networks, roles and limits; and records that are refused."""

import pytest
from forebay_gateway.teams import keymaker
from forebay_gateway.teams.access import Access, Gatekeeper, Standing
from forebay_gateway.teams.checks import parse
from forebay_gateway.teams.directory import Directory, encode
from forebay_gateway.teams.records import Budget, Key, Limits, Organisation, Team, place_of
from forebay_gateway.teams.secrets import split
from forebay_shared.errors import (
    AuthenticationError,
    InvalidRequestError,
    PermissionDeniedError,
)
from forebay_shared.wire import Changed
from msgspec.structs import replace
from teams_house import BASICS, NOW, PEPPER, filled, key_of


def enter(directory: Directory, sent: str, client: str = "10.1.2.3", now: float = NOW):
    token = split(sent.encode())
    assert token is not None
    return Gatekeeper(directory).open(token, PEPPER, now, client)


def test_a_key_opens_with_its_whole_secret_and_nothing_else() -> None:
    key, sent = key_of()
    directory = filled(key)
    assert enter(directory, sent).team_id == "red"
    other, other_sent = key_of()
    for wrong in (sent[:-1], sent + "0", other_sent, sent.replace(key.id, other.id)):
        with pytest.raises(AuthenticationError):
            enter(directory, wrong)


def test_what_is_no_key_of_ours_is_not_looked_up() -> None:
    for sent in (b"", b"sk-", b"sk-fb-", b"sk-fb-abc", b"sk-fb-abc-", b"sk-fb-\xff-x", b"sk-x-y"):
        assert split(sent) is None
    assert split(b"sk-fb-" + b"a" * 200 + b"-b") is None


def test_an_expired_key_a_disabled_parent_and_a_foreign_network_do_not_open() -> None:
    key, sent = key_of(expires=NOW + 10, networks=("10.0.0.0/8", "fd00::/8"), user="ann")
    directory = filled(key)
    assert enter(directory, sent, "::ffff:10.0.0.1").user is not None
    assert enter(directory, sent, "fd00::1").role == "member"
    with pytest.raises(AuthenticationError):
        enter(directory, sent, now=NOW + 10)
    for client in ("11.0.0.1", "", "fe80::1%eth0", "unix"):
        with pytest.raises(PermissionDeniedError):
            enter(directory, sent, client)
    for parent in (*BASICS[:2], BASICS[3], key):
        with pytest.raises(PermissionDeniedError, match="disabled"):
            enter(filled(key, replace(parent, disabled=True)), sent)


@pytest.mark.parametrize(
    ("fields", "lacks"),
    [
        ({"team": "gone"}, "team"),
        ({"user": "gone"}, "user"),
        ({"team": "lost"}, "organisation"),
        ({"team": "", "organisation": "gone", "role": "owner"}, "organisation"),
    ],
)
def test_a_key_below_nothing_opens_nothing(fields: dict, lacks: str) -> None:
    key, sent = key_of(**{"team": "red", **fields})
    directory = filled(key, Team(id="lost", organisation="gone"))
    with pytest.raises(PermissionDeniedError, match=f"The {lacks} of this API key does not exist"):
        enter(directory, sent)


def test_a_team_that_cannot_be_read_lets_none_of_its_keys_in() -> None:
    key, sent = key_of()
    directory = filled(key)
    newer = '{"id":"red","organisation":"acme","priority":"of a newer version"}'
    assert directory.follow(Changed(directory.revision + 1, "team/red", newer))
    with pytest.raises(PermissionDeniedError, match="team of this API key"):
        enter(directory, sent)


def test_a_rotated_key_has_two_secrets_until_the_grace_ends() -> None:
    key, first = key_of()
    key, second = keymaker.rotate(key, PEPPER, NOW, 60)
    key, third = keymaker.rotate(key, PEPPER, NOW + 1, 60)
    directory = filled(key)
    assert enter(directory, third)
    assert enter(directory, second, now=NOW + 60.9)
    for sent, now in ((first, NOW), (second, NOW + 61)):
        with pytest.raises(AuthenticationError):
            enter(directory, sent, now=now)
    key, fourth = keymaker.rotate(key, PEPPER, NOW + 2, 0)
    assert len(key.secrets) == 1
    assert enter(filled(key), fourth)


def test_a_key_sees_the_models_that_it_and_its_team_may_use() -> None:
    team = Team(id="red", organisation="acme", models=("a", "b"))
    key, sent = key_of(models=("b", "c"))
    access = enter(filled(team, key), sent)
    assert [name for name in "abcd" if access.may_use(name)] == ["b"]
    key, sent = key_of()
    assert enter(filled(key), sent).may_use("anything")


def test_before_a_key_asks_its_tightest_limits_are_full() -> None:
    wide = Limits(requests_per_minute=9, tokens_per_minute=500, concurrent_requests=1)
    key, sent = key_of(limits=Limits(requests_per_minute=5))
    team = Team(id="red", organisation="acme", limits=wide)
    organisation = Organisation(id="acme", limits=Limits(tokens_per_day=400))
    access = enter(filled(organisation, team, key), sent)
    assert access.unused == Standing((5, 5, 0.0), (400, 400, 0.0))
    key, sent = key_of(budgets=(Budget(amount=1),))
    assert enter(filled(key), sent).unused == Standing(None, None)


def test_what_is_left_grows_while_nobody_asks_and_outlasts_changes_of_others() -> None:
    minute, day = (60, 30, 30.0), (1000, 0, 90_000.0)
    standing = Standing(minute, day, at=100.0)
    assert standing.later(100.0) == standing
    assert standing.later(110.0) == Standing((60, 40, 20.0), (1000, 0, 89_990.0), 110.0)
    assert standing.later(100.0 + 46_800) == Standing(
        (60, 60, 0.0), (1000, 500, 43_200.0), 46_900.0
    )
    assert standing.later(1e6) == Standing((60, 60, 0.0), (1000, 1000, 0.0), 1e6)
    overdrawn = Standing(None, (60, 0, 90.0), at=0.0)
    assert overdrawn.later(20.0).tokens == (60, 0, 70.0)
    assert overdrawn.later(60.0).tokens == (60, 30, 30.0)

    key, sent = key_of(limits=Limits(requests_per_minute=60))
    directory = filled(key)
    keeper = Gatekeeper(directory)
    token = split(sent.encode())
    assert token is not None

    def change(entry: Key | Team) -> Access:
        place, revision = place_of(entry), directory.revision + 1
        assert directory.follow(Changed(revision, place, encode(entry)))
        return keeper.open(token, PEPPER, NOW, "")

    keeper.open(token, PEPPER, NOW, "").standing = standing
    assert change(Team(id="blue", organisation="acme", name="Blue")).standing == standing
    assert change(replace(key, name="mine")).standing == standing
    assert change(replace(key, limits=Limits(requests_per_minute=50))).standing is None


def test_a_users_role_bounds_its_keys_and_teams_have_salts_of_their_own() -> None:
    key, sent = key_of(role="owner", user="ann")
    red = enter(filled(key), sent)
    key, sent = key_of("blue")
    blue = enter(filled(key), sent)
    assert red.role == "admin"
    assert red.cache_salt != blue.cache_salt
    assert red.engine_team != blue.engine_team
    assert "red" not in red.cache_salt + red.engine_team
    sharing = Team(id="blue", organisation="acme", share_cache=True, priority="high", weight=2)
    access = enter(filled(sharing, key), sent)
    assert (access.cache_salt, access.weight) == ("", 16.0)


@pytest.mark.parametrize(
    ("kind", "tree", "field"),
    [
        ("team", {"id": "a"}, "x: Object missing required field `organisation`"),
        ("team", {"id": "A b", "organisation": "o"}, "x.id"),
        ("team", {"id": "a", "organisation": "o", "wieght": 1}, "x.wieght"),
        ("team", {"id": "a", "organisation": "o", "limits": {"rpm": 1}}, "x.limits.rpm"),
        ("team", {"id": "a", "organisation": "o", "weight": 0}, "x.weight"),
        ("team", {"id": "a", "organisation": "o", "budgets": [{"amount": -1}]}, r"x.budgets\[0\]"),
        (
            "team",
            {"id": "a", "organisation": "o", "budgets": [{"amount": 1, "time_zone": "Mars/X"}]},
            r"x.budgets\[0\].time_zone",
        ),
        (
            "team",
            {"id": "a", "organisation": "o", "budgets": [{"amount": 1}, {"amount": 2}]},
            r"x.budgets\[1\] is the second",
        ),
        ("key", {"id": "a", "team": "t", "networks": ["10.0.0.1/8"]}, r"x.networks\[0\]"),
        ("key", {"id": "a", "team": "t", "routes": ["chat"]}, r"x.routes\[0\]"),
        ("key", {"id": "a", "role": "admin"}, "x.team"),
        ("key", {"id": "a", "team": "t", "organisation": "o"}, "x.organisation"),
        ("alias", {"id": "a", "targets": []}, "x.targets"),
        ("alias", {"id": "a", "targets": [{"model": "m", "weight": 0}]}, "x.targets"),
        ("alias", {"id": "a", "targets": [{"model": "m"}], "deprecated": "soon"}, "x.deprecated"),
        ("organisation", [], "x: Expected `object`"),
    ],
)
def test_a_bad_record_is_refused_by_its_field(kind, tree, field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        parse(kind, tree, "x")
