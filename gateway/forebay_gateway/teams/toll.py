"""A caller's way through the limiter: who pays, for which model, and what its headers say."""

from forebay_shared.books import UsageRecord

from forebay_gateway.teams.access import Access
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.limiter import Limiter, Permit, RefusedError, Standing


class TeamToll:
    """One job of a team's caller: `alias` is the name it asked for, `model` the served one."""

    __slots__ = ("_access", "_alias", "_caller", "_limiter", "_model")

    def __init__(
        self, limiter: Limiter, caller: Caller, access: Access, alias: str, model: str
    ) -> None:
        self._limiter = limiter
        self._caller = caller
        self._access = access
        self._alias = alias
        self._model = model

    async def admit(self, request_id: str, input_tokens: int, output_tokens: int) -> Permit:
        """Reserves; the answer's headers say what is left. Raises RateLimitError, BusError."""
        access = self._access
        record = UsageRecord(
            id=request_id,
            key=access.key.id,
            user=access.user.id if access.user else "",
            team=access.team_id,
            organisation=access.organisation_id,
            model=self._model,
            alias=self._alias,
        )
        try:
            permit = await self._limiter.admit(access, record, input_tokens, output_tokens)
        except RefusedError as error:
            self._tell(error.standing)
            raise
        if permit.standing is not None:
            self._tell(permit.standing)
        return permit

    def _tell(self, standing: Standing) -> None:
        self._access.standing = standing
        self._caller.standing = standing
