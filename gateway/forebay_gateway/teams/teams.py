"""Teams, as the gateway's HTTP side sees them: who a presented key is. Everything else hangs here.

It knows no HTTP; `sync` knows Redis.
"""

import time
from collections.abc import Callable

from forebay_shared.bus import Publisher
from forebay_shared.settings import GatewaySettings

from forebay_gateway.meter import Toll
from forebay_gateway.teams.access import Access, Gatekeeper
from forebay_gateway.teams.admin import Admin
from forebay_gateway.teams.aliases import configured
from forebay_gateway.teams.bearer import Bearers
from forebay_gateway.teams.bookkeeper import Bookkeeper
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.exporter import Exporter
from forebay_gateway.teams.jwks import KeyKeeper
from forebay_gateway.teams.limiter import Limiter
from forebay_gateway.teams.reports import Reports
from forebay_gateway.teams.secrets import Token
from forebay_gateway.teams.sinks import open_sink
from forebay_gateway.teams.store import DirectoryStore
from forebay_gateway.teams.sync import DirectorySync
from forebay_gateway.teams.toll import TeamToll


class Teams:
    """The directory, its mirror and its keys."""

    def __init__(
        self,
        settings: GatewaySettings,
        publisher: Publisher,
        gateway: str,
        is_served: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """`is_served`: whether a worker serves a model of this name. Raises StartError."""
        self.directory = Directory(configured(settings.alias))
        self.sync = DirectorySync(settings.redis_url, self.directory, settings.key_pepper)
        self.store = DirectoryStore(publisher, self.directory, self.sync)
        self.admin = Admin(self.directory, self.store, self.sync, is_served)
        self.limiter = Limiter(publisher, self.directory)
        self.bookkeeper = Bookkeeper(settings.redis_url, gateway)
        self.exporters = [
            Exporter(
                settings.redis_url,
                gateway,
                target,
                open_sink(target, settings.usage_export_format),
            )
            for target in settings.usage_export
        ]
        self.reports = Reports(self.directory, self.bookkeeper)
        self._gatekeeper = Gatekeeper(self.directory)
        self.keeper = KeyKeeper(self.directory)
        self._bearers = Bearers(self.directory, self.keeper)
        self._always = settings.teams

    @property
    def closed(self) -> bool:
        """Nobody may call without a key: there are keys or were, or it was asked for.

        Raises BusError while nobody can know.
        """
        if self._always or self.directory.held:
            return True
        self.sync.must_be_fresh("Keys")
        return False

    def identify(self, token: Token, client: str) -> Caller:
        """The caller with this key. `client` is its address.

        Raises:
            AuthenticationError, PermissionDeniedError: it may not call.
            BusError: nobody can know now.
        """
        self.sync.must_be_fresh("Keys")
        access = self._gatekeeper.open(token, self.sync.pepper, time.time(), client)
        return Caller(access.engine_team, access, self)

    async def identify_bearer(self, presented: bytes, client: str) -> Caller:
        """The caller with this signed token.

        Raises:
            AuthenticationError, PermissionDeniedError: it may not call.
            OverloadedError: nobody can know now.
        """
        self.sync.must_be_fresh("Keys")
        access, name = await self._bearers.open(presented, time.time(), client)
        return Caller(access.engine_team, access, self, name=name)

    def toll(self, caller: Caller, access: Access, alias: str, model: str) -> Toll:
        """Who pays for a job; see Caller.toll."""
        return TeamToll(self.limiter, caller, access, alias, model)
