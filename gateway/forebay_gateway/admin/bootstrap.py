"""The first owner's key of a fleet: written to its Redis directly, since nobody may call yet."""

import asyncio
import os
import time

from forebay_shared.bus import Publisher
from forebay_shared.embedded import check_server
from forebay_shared.errors import ForebayError
from forebay_shared.link import LINK_ERRORS
from forebay_shared.settings import GatewaySettings, Secret, StartError
from forebay_shared.supervise import Supervisor

from forebay_gateway.teams import keymaker
from forebay_gateway.teams.records import Key, place_of
from forebay_gateway.teams.store import Change
from forebay_gateway.teams.teams import Teams

LOADED_S = 15.0
NAME = "first owner"


def first_key(redis_url: str) -> str:
    """Its token. Raises StartError when there are keys already, or no Redis."""
    check_server(Secret(redis_url), "--redis-url")
    try:
        return asyncio.run(_first_key(Secret(redis_url)))
    except (ForebayError, *LINK_ERRORS) as error:
        raise StartError(f"the key was not made: {error or 'Redis does not answer'}") from None


async def _first_key(redis_url: Secret) -> str:
    # The pepper comes from the environment, as a gateway's does, or is the one in Redis.
    settings = GatewaySettings(redis_url=redis_url, key_pepper=_given_pepper())
    publisher = Publisher(redis_url)
    teams = Teams(settings, publisher, "admin")
    async with Supervisor("admin") as tasks:
        tasks.start("publisher", publisher.run())
        tasks.start("directory", teams.sync.run())
        async with asyncio.timeout(LOADED_S):
            await teams.sync.loaded()
        if teams.directory.all("key"):
            raise StartError("there are keys already: use one of an owner's as FOREBAY_ADMIN_KEY")
        asked = Key(id="0", name=NAME, role="owner")
        key, token = keymaker.make(asked, await teams.sync.make_pepper(), time.time())
        await teams.store.write(
            [Change(place_of(key), key, 0)], who="forebay admin init", what="{}"
        )
        return token


def _given_pepper() -> Secret:
    return Secret(os.environ.get("FOREBAY_KEY_PEPPER", ""))
