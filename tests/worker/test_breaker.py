"""Which replica of an upstream gets a call. Pure: the time is given."""

from forebay_worker.engines.http.breaker import ASIDE_S, TRIP_AT, Replica, choose


def test_a_trip_counts_once_for_each_time_aside() -> None:
    replica = Replica("a")
    for _ in range(TRIP_AT + 4):  # calls that were open together
        replica.failed(100.0, "status")
    assert sum(replica.trips.values()) == 1
    assert replica.is_aside(100.0)
    again = replica.aside_until
    assert not replica.is_aside(again)
    replica.failed(again, "timeout")
    assert replica.trips == {"unreachable": 0, "timeout": 1, "status": 1, "answer": 0}
    replica.succeeded()
    assert not replica.is_aside(again)


def test_the_last_replica_is_never_set_aside() -> None:
    alone = [Replica("a")]
    for _ in range(20):
        alone[0].failed(100.0, "status")
    assert choose(alone, 100.0) is alone[0]
    two = [Replica("a"), Replica("b")]
    for _ in range(TRIP_AT):
        two[0].failed(100.0, "status")
    assert choose(two, 100.0) is two[1]
    two[1].up = False
    assert choose(two, 100.0) is two[0], "one that fails is better than one that is gone"
    two[1].up = True
    two[1].open = 5
    assert choose(two, 101.0 + ASIDE_S) is two[0], "its time is over"
