"""Scheduler: which tokens the next step computes, and who has to wait or give way for them.

It moves sequences between the waiting queue and the running list and keeps their block tables wide
enough. It knows no runner, no clock and no client.

Running sequences stand in the order of (priority, arrival). Each gets its one token or a chunk of
its prefill, then the waiting ones are admitted while budget, seats and blocks last. A prompt's
blocks are taken whole at admission, so only decodes can run out of blocks; then the last of the
running gives way and is computed again later. The first never does: something always moves on.
Beside decodes a step prefills less than the whole budget, since each of them waits for its end:
8,192 tokens of an 8B take 190 ms on an H200, 2,048 some 45, and as long for each token. So it does
where requests are of teams: another team's may come at any time, and waits for the step that runs.
Where teams contend, one that holds more than its share gives way too, and prefills leave the budget
to who has been served less.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.block_manager import BlockManager
from forebay_worker.engine.fairness import over_share
from forebay_worker.engine.sequence import Sequence
from forebay_worker.engine.waiting import WaitingQueue

MAX_SCORED = 256
"""Prompt tokens that one step scores, and at least one of each scoring sequence: each takes a row
of logits, 0.2 MB of 49,152 ids."""
_MAX_PASSED_OVER = 16
"""Followers of a running prefill that one step looks past at most: it bounds the host time."""


@dataclass(slots=True)
class Plan:
    """One step. `sequences[i]` owns `rows[i]`; rows of one token come first, `num_single` of them.

    `started` are those in their first step; prefix counts are tokens, over admissions of this step.
    """

    sequences: list[Sequence] = field(default_factory=list[Sequence])
    rows: list[ScheduledRow] = field(default_factory=list[ScheduledRow])
    started: list[Sequence] = field(default_factory=list[Sequence])
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    scored: int = 0
    num_single: int = 0

    def add_last(self, sequence: Sequence) -> None:
        """A row for its last token, as most of a step's rows are: what `add` does, in less time."""
        self.sequences.append(sequence)
        self.rows.append(ScheduledRow(sequence, 1, not sequence.is_full))

    def add(self, sequence: Sequence, num_new: int) -> None:
        at_end = sequence.num_computed + num_new == sequence.length
        scored = sequence.to_score(num_new)
        self.scored += len(scored)
        self.sequences.append(sequence)
        self.rows.append(ScheduledRow(sequence, num_new, at_end and not sequence.is_full, scored))

    def put_single_tokens_first(self) -> None:
        """Rows of one token before the others, else in their order."""
        single = [row.num_new == 1 for row in self.rows]
        self.num_single = sum(single)
        if not all(single[: self.num_single]):
            order = sorted(range(len(single)), key=lambda at: not single[at])
            self.sequences = [self.sequences[at] for at in order]
            self.rows = [self.rows[at] for at in order]

    def bound(self, sequence: Sequence, num_new: int) -> int:
        """As many of `num_new` tokens as the step may score, if it scores those of `sequence`."""
        return min(num_new, max(1, MAX_SCORED - self.scored)) if sequence.is_scoring else num_new

    def pairs(self) -> Iterable[tuple[Sequence, ScheduledRow]]:
        return zip(self.sequences, self.rows, strict=True)


class Scheduler:
    """Queues and the token budget.

    At most `token_budget` sequences run, so that each of them gets at least one token per step.
    While a step is in flight `schedule` must not be called when it `is_tight`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        prefill_budget: int | None = None,
    ) -> None:
        """`prefill_budget`: tokens of prefills in a step that decodes too, or is for teams; None:
        what is left."""
        self.waiting = WaitingQueue[Sequence]()
        self.running: list[Sequence] = []
        self._blocks = blocks
        self._max_running = min(max_num_seqs, token_budget)
        self._token_budget = token_budget
        self._prefill_budget = prefill_budget or token_budget
        self._stuck: Sequence | None = None
        self._stuck_room = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def tokens_to_prefill(self) -> int:
        """Uncached prompt tokens that are still to be computed, waiting and running."""
        tokens = self.waiting.tokens
        for sequence in self.running:  # a loop without calls: every step asks for all that run
            rest = len(sequence.token_ids) + sequence.num_pending - sequence.num_computed
            if rest > 1:
                tokens += rest
        return tokens

    @property
    def is_tight(self) -> bool:
        """Whether the next step may have to preempt one that runs."""
        if self._over_share() is not None:
            return True
        free, size = self._blocks.num_free, self._blocks.block_size
        if free >= len(self.running):
            return False
        growing = (each for each in self.running if each.length > len(each.block_table) * size)
        return sum(1 for _ in growing) > free

    def add(self, sequence: Sequence, *, follows: bool = False) -> None:
        """Queues a new sequence; the pool must be able to hold `sequence.limit` tokens.

        One that follows a sibling will find the blocks of its prompt in the cache.
        """
        size = self._blocks.block_size
        reused = sequence.num_prompt // size if follows else len(self._blocks.match(sequence))
        sequence.queued_tokens = len(sequence.token_ids) - reused * size
        self.waiting.enter(sequence)

    def remove(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Takes out an ended sequence with its blocks; none of a poisoned one is reused."""
        if sequence.block_table:
            self.running.remove(sequence)
            self._blocks.release(sequence, poisoned=poisoned)
        self.waiting.leave(sequence)

    def schedule(self) -> Plan:
        plan = Plan()
        self._share_out(plan)
        budget = self._continue_running(plan)
        self._admit_waiting(plan, budget)
        plan.put_single_tokens_first()
        return plan

    def _share_out(self, plan: Plan) -> None:
        """Sequences of a team that holds too much go back to the head of its line."""
        while (victim := self._over_share()) is not None and not victim.num_pending:
            self._preempt(victim, plan)

    def _over_share(self) -> Sequence | None:
        """Who gives way to the next in line, where it lacks a seat or blocks."""
        head = self.waiting.head()
        if head is None or not self.waiting.is_contended:
            return None
        if len(self.running) >= self._max_running:
            return over_share(self.running, head, lambda _: 1, self.waiting.standing)
        if self._is_stuck(head) or self._room * self._blocks.block_size < head.queued_tokens:
            return over_share(self.running, head, self._blocks_of, self.waiting.standing)
        return None

    def _blocks_of(self, sequence: Sequence) -> int:
        return len(sequence.block_table) or -(-len(sequence.token_ids) // self._blocks.block_size)

    def _continue_running(self, plan: Plan) -> int:
        """Rows for what runs already, decodes before prefills; the budget that is left."""
        prefills: list[Sequence] = []
        size = self._blocks.block_size
        at = 0
        while at < len(self.running):
            sequence = self.running[at]
            at += 1
            length = sequence.length
            rest = length - sequence.num_computed
            if rest > 1:
                prefills.append(sequence)
            elif rest == 0 or (sequence.num_pending and length >= sequence.limit):
                continue  # its last token is on the way
            elif length <= len(sequence.block_table) * size or self._make_room(sequence, plan):
                plan.add_last(sequence)
                self.waiting.charge(sequence, length)
            else:
                break
        stayed = [sequence for sequence in prefills if sequence.block_table]
        budget = self._token_budget - len(plan.rows)
        if plan.rows or self.waiting.is_shared:
            budget = min(budget, max(self._prefill_budget, len(stayed)))
        return self._continue_prefills(plan, stayed, budget)

    def _continue_prefills(self, plan: Plan, prefills: list[Sequence], budget: int) -> int:
        """A chunk for each, which leaves one token for each after it and, where teams contend, what
        the next in line needs, of one that has been served less.
        """
        head: Sequence | None = None
        if prefills and self.waiting.is_contended:
            prefills.sort(key=lambda each: (each.priority, self.waiting.standing(each.team)))
            head = self._next_in_line()
        for after, sequence in enumerate(prefills, 1 - len(prefills)):
            spare = budget + after
            if head is not None and self._is_behind(sequence, head):
                spare = max(1, spare - head.queued_tokens)
            rest = sequence.length - sequence.num_computed
            num_new = plan.bound(sequence, min(rest, spare))
            self._give(plan, sequence, num_new)
            budget -= num_new
        return budget

    def _next_in_line(self) -> Sequence | None:
        """The waiting sequence that this step may start, as far as seats and blocks are known."""
        head = self.waiting.head()
        if head is None or len(self.running) >= self._max_running or self._is_stuck(head):
            return None
        return head

    def _is_behind(self, sequence: Sequence, head: Sequence) -> bool:
        if sequence.priority != head.priority:
            return sequence.priority > head.priority
        return self.waiting.standing(sequence.team) > self.waiting.standing(head.team)

    def _make_room(self, sequence: Sequence, plan: Plan) -> bool:
        """Blocks for its next token, if need be the last one's; False when it gave way itself."""
        while not self._blocks.grow(sequence, sequence.length):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        assert not sequence.num_pending, "what has not landed cannot be computed again"
        self.running.remove(sequence)
        self._blocks.release(sequence)
        sequence.queued_tokens = min(len(sequence.token_ids), self._blocks.block_size)
        self.waiting.push_back(sequence)
        plan.preemptions += 1

    def _admit_waiting(self, plan: Plan, budget: int) -> None:
        """Starts waiting sequences in their order until one does not fit.

        One whose next block a running sequence is computing is passed over, until it can have it.
        """
        passed_over: list[Sequence] = []
        while budget > 0 and len(self.running) < self._max_running:
            sequence = self.waiting.head()
            if sequence is None or self._is_stuck(sequence) or len(passed_over) == _MAX_PASSED_OVER:
                break
            hits = self._blocks.match(sequence)
            if self._blocks.is_promised(sequence, len(hits)):
                self.waiting.pop(sequence)
                passed_over.append(sequence)
            elif self._blocks.admit(sequence, hits, spare=len(self.running)):
                budget -= self._start(plan, sequence, budget)
            else:
                self._stuck, self._stuck_room = sequence, self._room
        for sequence in reversed(passed_over):
            self.waiting.push_back(sequence)

    @property
    def _room(self) -> int:
        """Blocks to admit into: one stays spare for each running sequence, so that what is admitted
        is not soon preempted."""
        return self._blocks.num_free - len(self.running)

    def _is_stuck(self, sequence: Sequence) -> bool:
        """Whether it did not fit before and there is no more room now; saves a match per step."""
        return sequence is self._stuck and self._room <= self._stuck_room

    def _start(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Moves an admitted sequence to the running ones; the tokens that its first chunk takes."""
        self.waiting.pop(sequence)
        if sequence.started_at is None:
            sequence.own()
            sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            plan.started.append(sequence)
            plan.prefix_queries += len(sequence.token_ids)
            plan.prefix_hits += sequence.num_computed
        sequence.num_served = max(sequence.num_served, sequence.num_computed)
        insort(self.running, sequence, key=lambda other: other.rank)
        num_new = min(len(sequence.token_ids) - sequence.num_computed, budget)
        num_new = plan.bound(sequence, num_new)
        self._give(plan, sequence, num_new)
        return num_new

    def _give(self, plan: Plan, sequence: Sequence, num_new: int) -> None:
        plan.add(sequence, num_new)
        self.waiting.charge(sequence, sequence.num_computed + num_new)
