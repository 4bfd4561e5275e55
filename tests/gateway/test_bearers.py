"""Signed tokens: who opens with one, as whom, and what happens when the keys change or go away."""

import asyncio
import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from forebay_gateway.teams import jwks
from forebay_gateway.teams.bearer import (
    MAX_REMEMBERED,
    MAX_TOKEN_BYTES,
    Bearers,
    looks_signed,
    values_of,
)
from forebay_gateway.teams.checks import parse
from forebay_gateway.teams.directory import Directory, decoded, encode
from forebay_gateway.teams.guards import actor_of
from forebay_gateway.teams.jwks import KeyKeeper
from forebay_gateway.teams.records import Entry, Grant, Issuer, User, place_of
from forebay_gateway.teams.tokens import read_keys
from forebay_shared.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
)
from issuer_house import AUDIENCE, ISS, KeyServer, Signer, key_server
from msgspec.structs import replace
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil
from teams_house import BASICS, gateways, write

ONE, TWO = Signer("one"), Signer("two")
RED = Grant(claim="groups", value="reds", team="red")


def issuer(server: KeyServer | str, *grants: Grant, **fields: Any) -> Issuer:
    where = server if isinstance(server, str) else server.url
    given = {"issuer": ISS, "audiences": (AUDIENCE,), "jwks": where, "grants": grants or (RED,)}
    return Issuer(id="corp", **{**given, **fields})


def load(directory: Directory, *entries: Entry) -> None:
    values = [(place_of(entry), f"1 {encode(entry)}") for entry in (*BASICS, *entries)]
    directory.replace(directory.revision + 1, decoded(values))


class Door:
    """Bearers over a directory, whose keys are kept by a task."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.keeper = KeyKeeper(directory)
        self.bearers = Bearers(directory, self.keeper)

    async def open(self, token: str | bytes):
        sent = token.encode() if isinstance(token, str) else token
        access, _ = await self.bearers.open(sent, time.time(), "")
        return access

    async def refused(self, token: str | bytes, error: type[Exception], says: str) -> None:
        with pytest.raises(error, match=says):
            await self.open(token)


@asynccontextmanager
async def door(*entries: Entry) -> AsyncIterator[Door]:
    made = Door(Directory())
    load(made.directory, *entries)
    task = asyncio.create_task(made.keeper.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("algorithm", ["RS256", "PS256", "ES256", "EdDSA"])
async def test_a_signed_token_opens_as_what_its_claims_are_granted(algorithm: str) -> None:
    signer = Signer("k", algorithm)
    with key_server(signer) as server:
        async with door(issuer(server, algorithms=(algorithm,))) as house:
            access = await house.open(signer.token(groups=["blues", "reds"]))
            assert (access.team_id, access.organisation_id, access.role) == (
                "red",
                "acme",
                "member",
            )
            assert access.user is not None  # the token's sub is a user of that team
            assert access.user.id == "ann"
            assert await house.open(signer.token(groups="reds")) is access
            stranger = await house.open(signer.token(groups="reds", sub="zoe"))
            assert stranger.user is None
            assert server.asked == 1


async def test_what_no_grant_maps_is_refused_in_plain_words() -> None:
    with key_server(ONE) as server:
        owner = Grant(claim="realm_access.roles", value="root", role="owner")
        boss = Grant(claim="admin", value="true", organisation="acme", role="owner")
        listed = Grant(claim="https://x.y/z", value="v", team="blue", role="viewer")
        async with door(issuer(server, RED, owner, boss, listed)) as house:
            says = "nothing here is granted"
            for claims in ({}, {"groups": []}, {"groups": "red"}, {"groups": {"reds": 1}}):
                await house.refused(ONE.token(**claims), PermissionDeniedError, says)
            root = await house.open(ONE.token(realm_access={"roles": ["root"]}))
            assert (root.role, root.team_id, root.organisation_id) == ("owner", "", "")
            first = await house.open(ONE.token(admin=True, groups=["reds"]))
            assert (first.role, first.team_id) == ("member", "red")
            assert (await house.open(ONE.token(admin=True))).organisation_id == "acme"
            seen = await house.open(ONE.token(**{"https://x.y/z": "v"}))
            assert (seen.team_id, seen.role) == ("blue", "viewer")


FAR = time.time() + 86_400
"""These are collected long before they run."""


@pytest.mark.parametrize(
    ("claims", "says"),
    [
        ({"exp": time.time() - 60}, "has expired"),
        ({"exp": "soon"}, "not valid"),
        ({"exp": 10**400}, "not valid"),
        ({"exp": float("inf")}, "not a valid JWT"),
        ({"nbf": FAR}, "not valid yet"),
        ({"iat": FAR}, "not valid yet"),
        ({"aud": "another"}, "audience"),
        ({"aud": ["a", "b"]}, "audience"),
        ({"iss": ISS + "x"}, "issuer is not known"),
        ({"without": "exp"}, "needs exp, iss and aud"),
        ({"without": "aud"}, "needs exp, iss and aud"),
        ({"without": "iss"}, "not a valid JWT"),
        ({"sub": 5}, "not valid"),
        ({"head": {"crit": ["b64"], "b64": True}}, "extension"),
        ({"head": {"kid": "three"}}, "key that its issuer has not"),
    ],
)
async def test_a_token_that_is_not_for_here_and_now_is_refused(claims: dict, says: str) -> None:
    with key_server(ONE, TWO) as server:
        async with door(issuer(server)) as house:
            bad = ONE.token(groups="reds", **claims)
            await house.refused(bad, AuthenticationError, says)
            assert await house.open(ONE.token(groups="reds"))


async def test_clocks_may_differ_by_the_leeway() -> None:
    now = time.time()
    with key_server(ONE) as server:
        async with door(issuer(server, leeway_s=120)) as house:
            for claims in ({"exp": now - 60}, {"nbf": now + 60}, {"iat": now + 60}):
                assert await house.open(ONE.token(groups="reds", **claims))
        async with door(issuer(server, leeway_s=0)) as house:
            late = ONE.token(groups="reds", exp=now - 5)
            await house.refused(late, AuthenticationError, "expired")


def signed_by_hand(head: dict, claims: dict, secret: bytes | None) -> bytes:
    def part(data: bytes) -> bytes:
        return base64.urlsafe_b64encode(data).rstrip(b"=")

    text = part(json.dumps(head).encode()) + b"." + part(json.dumps(claims).encode())
    return text + b"." + (part(hmac.digest(secret, text, "sha256")) if secret else b"")


async def test_no_key_is_taken_for_another_kind() -> None:
    """`none`, a public key as a shared secret, another key's signature, keys that tokens bring."""
    now = time.time()
    claims = {"iss": ISS, "aud": AUDIENCE, "exp": now + 600, "groups": "reds"}
    rsa = Signer("rsa", "RS256")
    shared = {
        "kty": "oct",
        "kid": "shared",
        "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0",
        "alg": "HS256",
    }
    with key_server(ONE, rsa) as server:
        server.keys.append(shared)
        async with door(issuer(server)) as house:
            for kid in ("one", "rsa", "shared", ""):
                for alg in ("none", "None", "HS256", "RS512", ""):
                    for secret in (None, json.dumps(rsa.jwk).encode(), b"secret" * 6):
                        head = {"alg": alg, "kid": kid, "typ": "JWT"}
                        forged = signed_by_hand(head, claims, secret)
                        await house.refused(forged, AuthenticationError, ".")
            for forged in (
                TWO.token(groups="reds", head={"kid": "one"}),
                TWO.token(groups="reds", head={"kid": "one", "jwk": TWO.jwk}),
                TWO.token(groups="reds", head={"kid": "one", "jku": server.url}),
                Signer("one", "RS256").token(groups="reds"),
            ):
                await house.refused(forged, AuthenticationError, ".")
            good = ONE.token(groups="reds")
            head, body, signature = good.split(".")
            other = ONE.token(groups="reds", sub="zoe").split(".")[1]
            for forged in (
                f"{head}.{other}.{signature}",
                f"{head}.{body}.",
                f"{head}.{body}.{signature[:-4]}{'BBBB' if signature.endswith('AAAA') else 'AAAA'}",
            ):
                await house.refused(forged, AuthenticationError, "signature|not valid")
            assert await house.open(good)


async def test_garbage_and_huge_tokens_cost_nothing() -> None:
    with key_server(ONE) as server:
        async with door(issuer(server)) as house:
            huge = ONE.token(groups="reds", filler="x" * MAX_TOKEN_BYTES)
            await house.refused(huge, AuthenticationError, "larger than 8192")
            deep = b"eyJ9." + base64.urlsafe_b64encode(b'{"iss":' + b"[" * 5_000) + b".x"
            numbered = signed_by_hand({"alg": "ES256"}, {"iss": 5}, b"x")
            for bad in (numbered, b"eyJ..", b"eyJ.\xff.\xff", b"eyJhIjox.e30.", b"eyJ!.!.!", deep):
                assert looks_signed(bad)
                await house.refused(bad, AuthenticationError, "not a valid JWT")
            good = ONE.token(groups="reds").encode()
            await house.refused(good + b"\xff", AuthenticationError, ".")
            assert server.asked <= 1
            assert not len(house.bearers)
    for other in (b"sk-fb-1-2", b"", b"eyJ", b"a.b.c", b"eyJ.a.b.c"):
        assert not looks_signed(other)


async def test_a_new_key_fails_no_request_and_one_that_is_gone_opens_no_more() -> None:
    with key_server(ONE) as server:
        async with door(issuer(server)) as house:
            old = ONE.token(groups="reds")
            assert await house.open(old)
            server.keys = [TWO.jwk]
            fresh = TWO.token(groups="reds")
            opened = await asyncio.gather(*(house.open(fresh) for _ in range(50)))
            assert len(opened) == 50
            assert server.asked == 2
            await house.refused(old, AuthenticationError, "key that its issuer has not")


async def test_unknown_keys_ask_the_issuer_a_few_times_and_no_more() -> None:
    with key_server(ONE) as server:
        async with door(issuer(server)) as house:
            for number in range(100):
                bad = TWO.token(groups="reds", head={"kid": f"k{number}"})
                await house.refused(bad, AuthenticationError, "key that its issuer has not")
            assert server.asked <= 2 + jwks.ASKS
            assert await house.open(ONE.token(groups="reds"))


async def test_keys_that_cannot_be_read_are_a_503_and_then_old_ones_speak_for_a_time(
    monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    monkeypatch.setattr(jwks, "REFRESH_S", 0.05)
    monkeypatch.setattr(jwks, "RETRY_S", 0.05)
    monkeypatch.setattr(jwks, "TICK_S", 0.02)
    with key_server(ONE) as server:
        server.status = 500
        async with door(issuer(server)) as house:
            await house.refused(ONE.token(groups="reds"), OverloadedError, "cannot be checked now")
            assert house.keeper.failures
            server.status = 200
            await wait_until(lambda: house.keeper.version > 0)
            token = ONE.token(groups="reds")
            assert await house.open(token)
            server.status = 503
            failed = house.keeper.failures
            await wait_until(lambda: house.keeper.failures > failed + 1)
            assert await house.open(ONE.token(groups="reds", sub="bob"))
            monkeypatch.setattr(jwks, "STALE_S", 0.0)
            await house.refused(ONE.token(groups="reds", sub="eve"), OverloadedError, ".")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"keys":5}', b'{"keys":[' + b"{}," * 70 + b"{}]}", b"x" * 300_000],
)
async def test_what_is_no_set_of_keys_ends_nothing(body: bytes) -> None:
    with key_server(ONE) as server:
        server.body = body
        async with door(issuer(server)) as house:
            await house.refused(ONE.token(groups="reds"), OverloadedError, ".")
            server.body = None
            assert await house.open(ONE.token(groups="reds"))


async def test_a_redirect_is_not_followed_and_a_slow_issuer_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with key_server(ONE) as server, key_server(ONE) as other, key_server(TWO) as good:
        server.status, server.headers = 302, {"location": other.url}
        slow = replace(issuer(server), id="slow", issuer="slow")
        async with door(slow, issuer(good)) as house:
            token = ONE.token(groups="reds", iss="slow")
            await house.refused(token, OverloadedError, ".")
            assert other.asked == 0
            server.held.clear()
            monkeypatch.setattr(jwks, "FETCH_S", 2.0)
            late = asyncio.create_task(house.refused(token, OverloadedError, "."))
            assert await house.open(TWO.token(groups="reds"))
            await late


async def test_keys_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    async with door(issuer(str(file))) as house:
        await house.refused(ONE.token(groups="reds"), OverloadedError, ".")
        file.write_text(json.dumps({"keys": [ONE.jwk]}))
        assert await house.open(ONE.token(groups="reds"))


def test_only_keys_that_check_signatures_are_taken() -> None:
    weak, private = Signer("weak", "RS256", bits=1024), dict(ONE.jwk, kid="private", d="AAAA")
    others = [
        weak.jwk,
        private,
        dict(TWO.jwk, use="enc"),
        dict(TWO.jwk, key_ops=["sign"]),
        dict(TWO.jwk, alg="RS256"),
        dict(TWO.jwk, crv="secp256k1"),
        {"kty": "oct", "kid": "s", "k": "c2VjcmV0"},
        {"kid": 5, "kty": "EC"},
        {},
    ]
    keys = read_keys(json.dumps({"keys": [*others, ONE.jwk]}).encode())
    assert len(keys) == 1
    assert keys.find("one", "ES256") is keys.find("", "ES256") is not None
    assert keys.find("one", "ES384") is keys.find("one", "HS256") is None
    two = read_keys(json.dumps({"keys": [ONE.jwk, TWO.jwk]}).encode())
    assert two.find("", "ES256") is None


async def test_changes_of_the_directory_hold_for_tokens_that_were_seen() -> None:
    with key_server(ONE) as server:
        async with door(issuer(server)) as house:
            token = ONE.token(groups="reds")
            assert await house.open(token)
            disabled = replace(BASICS[1], disabled=True)
            load(house.directory, issuer(server))
            assert await house.open(token)
            for changed, error, says in (
                ((disabled, issuer(server)), PermissionDeniedError, "team of this token"),
                ((issuer(server, disabled=True),), PermissionDeniedError, "issuer"),
                ((), AuthenticationError, "issuer is not known"),
                (
                    (issuer(server, replace(RED, value="blues")),),
                    PermissionDeniedError,
                    "nothing here is granted",
                ),
            ):
                load(house.directory, *changed)
                await house.refused(token, error, says)


async def test_what_is_remembered_is_bounded() -> None:
    with key_server(ONE) as server:
        async with door(issuer(server)) as house:
            token = ONE.token(groups="reds")
            opened = await house.open(token)
            known = next(iter(house.bearers._opened.values()))
            for number in range(MAX_REMEMBERED + 10):
                house.bearers._remember(hashlib.sha256(b"%d" % number).digest(), known)
            assert len(house.bearers) == MAX_REMEMBERED
            assert await house.open(token) is opened


def test_claims_are_found_by_name_and_by_path() -> None:
    claims = {"a": {"b": ["x", 5, "y"]}, "a.c": "z", "scope": "read write", "n": 5, "no": False}
    assert values_of(claims, "a.b") == ["x", "y"]
    assert values_of(claims, "a.c") == ["z"]
    assert values_of(claims, "scope") == ["read", "write"]
    assert (values_of(claims, "n"), values_of(claims, "no")) == (["5"], ["false"])
    for absent in ("b", "a", "a.b.c", "", "a.x"):
        assert values_of(claims, absent) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"jwks": "http://login.example.com/keys"}, "x.jwks must be an https"),
        ({"jwks": "keys.json"}, "x.jwks"),
        ({"jwks": "https://user:pw@example.com/"}, "x.jwks"),
        ({"jwks": "https://"}, "x.jwks"),
        ({"jwks": "file:///etc/passwd"}, "x.jwks"),
        ({"algorithms": ["HS256"]}, r"x.algorithms\[0\]"),
        ({"algorithms": ["none"]}, r"x.algorithms\[0\]"),
        ({"algorithms": []}, "x.algorithms"),
        ({"audiences": []}, "x.audiences"),
        ({"grants": []}, "x.grants"),
        ({"grants": [{"claim": "a", "value": "b"}]}, r"x.grants\[0\].team is needed"),
        (
            {"grants": [{"claim": "a", "value": "b", "team": "red", "role": "owner"}]},
            r"x.grants\[0\].team goes with",
        ),
        ({"grants": [{"claim": "a", "value": "b", "team": "red", "rolle": "x"}]}, "rolle"),
        ({"limits": {"requests_per_minute": 5}}, "x.limits are a team's"),
    ],
)
def test_a_bad_issuer_is_refused_by_its_field(fields: dict, named: str) -> None:
    grant = {"claim": "groups", "value": "reds", "team": "red"}
    tree = {"id": "corp", "issuer": ISS, "audiences": ["a"], "jwks": "/keys", "grants": [grant]}
    assert parse("issuer", tree, "x")
    with pytest.raises(InvalidRequestError, match=named):
        parse("issuer", {**tree, **fields}, "x")


async def test_a_token_opens_on_every_gateway_and_its_issuer_cannot_lose_its_teams(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    with key_server(ONE) as server:
        async with gateways(redis_server.url, 2, wait_until) as backends:
            revision = await write(
                backends[0], [*BASICS, User(id="bob", team="red"), issuer(server)]
            )
            token = ONE.token(groups="reds", sub="bob").encode()
            for backend in backends:
                assert await backend.teams.sync.reached(revision, PATIENCE_S)
                caller = await backend.teams.identify_bearer(token, "")
                assert caller.team_id == "red"
                actor = actor_of(caller)
                assert (actor.name, actor.role, actor.user) == ("token corp: bob", "member", "bob")
            with pytest.raises(ConflictError, match="issuer/corp needs team/gone"):
                await write(backends[0], [issuer(server, replace(RED, team="gone"))])
            with pytest.raises(ConflictError, match="issuer of these tokens already"):
                await write(backends[0], [replace(issuer(server), id="other")])
            revision = await write(backends[0], [issuer(server, disabled=True)])
            for backend in backends:
                assert await backend.teams.sync.reached(revision, PATIENCE_S)
                with pytest.raises(PermissionDeniedError):
                    await backend.teams.identify_bearer(token, "")
