"""Who gives way so that no team holds much more of the engine than its share while another waits.

Tokens follow the weights by the order in which sequences start (`waiting`); but what has started
holds its seat and its blocks for long, and a flood holds all of them. So one sequence of the team
that holds most, for its weight, gives way to the next in line, when the shares are more even then.
Pure: it changes nothing.
"""

from collections.abc import Callable, Iterable

from forebay_worker.engine.sequence import Sequence
from forebay_worker.engine.waiting import Standing


def over_share(
    running: Iterable[Sequence],
    newcomer: Sequence,
    size: Callable[[Sequence], int],
    standing: Callable[[str], Standing],
) -> Sequence | None:
    """The last of the running sequences of the team that holds most; None when nobody has to.

    `size` is what a sequence holds or needs of what is scarce, `standing` what teams are ordered
    by: one that stands before the newcomer's would be next in line at once, so it keeps all.
    """
    held: dict[str, float] = {}
    last: dict[str, Sequence] = {}
    for sequence in running:
        team = sequence.team
        held[team] = held.get(team, 0.0) + size(sequence) / sequence.weight
        if sequence.priority >= newcomer.priority:
            last[team] = sequence
    mine = held.get(newcomer.team, 0.0) + size(newcomer) / newcomer.weight
    last.pop(newcomer.team, None)
    if not last:
        return None
    victim = last[max(last, key=held.__getitem__)]
    left = held[victim.team] - size(victim) / victim.weight
    even = left >= mine and standing(victim.team) > standing(newcomer.team)
    return victim if even else None
