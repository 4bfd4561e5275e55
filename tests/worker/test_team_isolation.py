"""What one team's requests tell another's: nothing, unless both share their cache.

Time is what an attacker measures; it is made of the steps of an engine and the rows in them, which
are counted here, so the test is exact where a clock would only be likely.
"""

from engine_fakes import FakeRunner, make_core, make_submit, run
from forebay_shared.wire import Started
from hypothesis import given, settings
from hypothesis import strategies as st

BUDGET = 8
prompts = st.lists(st.integers(2, 4), min_size=1, max_size=40)


class House:
    """An engine with a small cache and small steps."""

    def __init__(self) -> None:
        self.runner = FakeRunner(num_blocks=32)
        self.core = make_core(self.runner, max_num_batched_tokens=BUDGET, max_num_prefill_tokens=3)
        self._asked = 0

    def ask(self, prompt: list[int], team: str, salt: str) -> tuple[int, list[list[int]]]:
        """Cached tokens as the client is told, and the tokens of each row of each step."""
        self._asked += 1
        self.runner.batches.clear()
        submit = make_submit(f"r{self._asked}", prompt, team=team, cache_salt=salt)
        messages = run(self.core, submit)
        [started] = [message for message in messages if isinstance(message, Started)]
        shape = [[row.num_new for row in batch] for batch in self.runner.batches]
        return started.cached_tokens, shape


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=6), st.lists(prompts, min_size=1, max_size=6))
def test_with_a_salt_of_its_own_a_team_sees_nothing_of_what_another_asked(
    secrets: list[list[int]], probes: list[list[int]]
) -> None:
    """Blue's requests take the same steps in an engine where red was as in one where it was not."""
    shared, alone = House(), House()
    for secret in secrets:
        shared.ask(secret, "red", "salt of red")
    for probe in [*secrets, *probes]:
        assert shared.ask(probe, "blue", "salt of blue") == alone.ask(probe, "blue", "salt of blue")


def test_a_guess_that_is_right_costs_as_much_as_one_that_is_wrong() -> None:
    house, secret = House(), list(range(2, 34))
    house.ask(secret, "red", "salt of red")
    for right in range(len(secret) + 1):
        guess = secret[:right] + [50] * (len(secret) - right)
        salt = f"salt of blue {right}"  # else its own guesses are what it finds
        cached, shape = house.ask(guess, "blue", salt)
        assert cached == 0
        assert sum(map(sum, shape)) == len(guess) + 7, "all of the prompt, then each token"


def test_teams_that_share_find_each_others_prefixes() -> None:
    house, prompt = House(), list(range(2, 34))
    assert house.ask(prompt, "red", "")[0] == 0
    cached, shape = house.ask(prompt, "blue", "")
    assert cached == 28
    assert sum(map(sum, shape)) == len(prompt) - 28 + 7
    assert house.ask(prompt, "green", "salt of green")[0] == 0, "who does not share finds nothing"
