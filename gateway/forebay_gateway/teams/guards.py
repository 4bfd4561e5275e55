"""Who may see and change what in the directory: an actor, and rules that read as sentences.

What is not said here is forbidden. Pure: it knows no HTTP and no Redis.
"""

from typing import NamedTuple

from forebay_shared.errors import PermissionDeniedError
from msgspec.structs import asdict

from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.records import (
    ROLES,
    Alias,
    Entry,
    Key,
    Model,
    Role,
    Team,
    User,
    kind_of,
    share_of,
)


class Actor(NamedTuple):
    """Who acts. The fleet's owner has no organisation and no team."""

    name: str
    role: Role
    organisation: str = ""
    team: str = ""
    user: str = ""
    key: Key | None = None
    """What it acts by; None for the admin key."""

    @property
    def owns_fleet(self) -> bool:
        return self.role == "owner" and not self.organisation

    @property
    def owns_organisation(self) -> bool:
        return self.role == "owner" and bool(self.organisation)


def actor_of(caller: Caller) -> Actor:
    """The actor behind a request. Raises PermissionDeniedError for who has no role at all."""
    if caller.root:
        return Actor("the admin key", "owner")
    access = caller.access
    if access is None:
        raise PermissionDeniedError("This API key has no role in the admin API.")
    return Actor(
        caller.name or f"key {access.key.id}",
        access.role,
        access.organisation_id,
        access.team_id,
        access.user.id if access.user else "",
        access.key,
    )


class Guard:
    """The rules for one actor."""

    def __init__(self, actor: Actor, directory: Directory) -> None:
        self.actor = actor
        self._directory = directory

    def must_own_the_fleet(self) -> None:
        if not self.actor.owns_fleet:
            raise _denied("This is for the owner of the whole fleet.")

    def may_see(self, entry: Entry) -> bool:
        actor = self.actor
        if actor.owns_fleet:
            return True
        if isinstance(entry, Model) or (isinstance(entry, Alias) and not entry.team):
            return actor.owns_organisation or self._may_ask_for(entry)
        if actor.owns_organisation:
            return self._is_of_its_organisation(entry)
        if kind_of(entry) == "team":
            return entry.id == actor.team
        if not self._is_of_its_team(entry):
            return False
        if actor.role == "admin" or isinstance(entry, Alias):
            return True
        return actor.role == "member" and self._is_its_own(entry)

    def must_see(self, entry: Entry) -> None:
        if not self.may_see(entry):
            raise _denied("Your role does not let you see this.")

    def must_change(self, entry: Entry) -> None:
        """For a record as it is and as it shall be, both."""
        actor = self.actor
        if actor.owns_fleet:
            return
        self._must_not_rise_above_itself(entry)
        if actor.owns_organisation:
            kinds, own = ("team", "user", "key", "alias"), self._is_of_its_organisation(entry)
        elif actor.role == "admin":
            kinds, own = ("user", "key", "alias"), self._is_of_its_team(entry)
        elif actor.role == "member":
            kinds, own = ("key",), self._is_its_own(entry)
            self._must_be_no_wider(entry)
        else:
            kinds, own = (), False
        if kind_of(entry) not in kinds or not own:
            raise _denied("Your role does not let you change this.")
        if isinstance(entry, Alias) and not actor.owns_organisation:
            self._must_name_models_of_its_team(entry)

    def must_not_take_more(self, before: Entry | None, after: Entry) -> None:
        """Of the engines, which all organisations share: what a team has there, the fleet gives."""
        if self.actor.owns_fleet or not isinstance(after, Team):
            return
        had = share_of(before) if isinstance(before, Team) else 1.0
        if share_of(after) > max(1.0, had):
            raise _denied("Only the owner of the fleet gives a team more than weight 1, normal.")

    def must_see_usage(self, organisation: str, team: str) -> None:
        """Of a whole team or organisation; empty: of all."""
        actor = self.actor
        if actor.owns_fleet:
            return
        if actor.owns_organisation:
            found = self._directory.team(team) if team else None
            if (found and found.organisation == actor.organisation) or (
                not team and organisation == actor.organisation
            ):
                return
        elif team and team == actor.team:
            return
        raise _denied("Your role does not let you see this usage: ask for your own team's.")

    def _is_of_its_organisation(self, entry: Entry) -> bool:
        return self._directory.organisation_of(entry) == self.actor.organisation

    def _is_of_its_team(self, entry: Entry) -> bool:
        team = self._directory.team_of(entry)
        return bool(team) and team == self.actor.team

    def _is_its_own(self, entry: Entry) -> bool:
        user = self.actor.user
        if not user or not self._is_of_its_team(entry):
            return False
        return (isinstance(entry, Key) and entry.user == user) or (
            isinstance(entry, User) and entry.id == user
        )

    def _may_ask_for(self, entry: Model | Alias) -> bool:
        """Whether its team has a name for this model or alias of all."""
        team = self._directory.team(self.actor.team)
        if team is None or not team.models:
            return team is not None
        if isinstance(entry, Alias):
            return entry.public_name in team.models
        aliases = [self._directory.alias(name, team.id) for name in team.models]
        led_to = {model for alias in aliases if alias is not None for model in alias.models}
        return entry.id in team.models or entry.id in led_to

    def _must_name_models_of_its_team(self, alias: Alias) -> None:
        """A new name for a model must not be a way to one that the team may not use."""
        team = self._directory.team(self.actor.team)
        names = team.models if team is not None else ()
        foreign = next((name for name in alias.models if names and name not in names), None)
        if foreign is not None:
            raise _denied(f"Your team may not use the model '{foreign}', so no alias of yours may.")

    def _must_be_no_wider(self, entry: Entry) -> None:
        """Who was given a narrow key must not make, widen or renew a wider one with it."""
        own = self.actor.key
        if own is not None and isinstance(entry, Key) and (wider := _wider(entry, own)):
            raise _denied(f"A member's key must not be wider than the one it acts by: {wider}.")

    def _must_not_rise_above_itself(self, entry: Entry) -> None:
        role = entry.role if isinstance(entry, Key | User) else None
        if role is not None and ROLES.index(role) > ROLES.index(self.actor.role):
            raise _denied(f"Your role cannot give the role '{role}'.")
        if isinstance(entry, Key) and role == "owner" and not (entry.team or entry.organisation):
            raise _denied("Your role cannot make an owner of the whole fleet.")


def _wider(key: Key, bound: Key) -> str:
    """The first field in which a key allows what `bound` does not; empty: there is none."""
    for field in ("models", "routes", "networks"):
        allowed, named = getattr(bound, field), getattr(key, field)
        if allowed and not (named and set(named) <= set(allowed)):
            return field
    if bound.expires and not 0 < key.expires <= bound.expires:
        return "expires"
    limits = asdict(key.limits)
    for field, most in asdict(bound.limits).items():
        if most is not None and (limits[field] is None or limits[field] > most):
            return f"limits.{field}"
    return "" if set(bound.budgets) <= set(key.budgets) else "budgets"


def _denied(message: str) -> PermissionDeniedError:
    return PermissionDeniedError(message)
