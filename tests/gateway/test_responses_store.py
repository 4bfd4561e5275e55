"""What is kept of responses, for how long, for whom; conversations; responses in the background."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
from forebay_gateway.api.responses import runs, store
from forebay_shared.errors import EngineError, RateLimitError
from forebay_shared.settings import GatewaySettings, Secret
from gateway_fakes import ANSWER, MODEL, Api, Play, ScriptedGeneration, wait_until
from patience import PATIENCE_S
from redis_house import RedisServer
from response_transcripts import check_events, check_response, split_events
from responses_house import RESPONSES, plain, post, prompt, responding, sdk, streamed
from transcripts import check_error

TEAMS = GatewaySettings(api_key=(Secret("sk-a"), Secret("sk-b")))


@pytest.fixture
def api(redis_url: str) -> Iterator[Api]:
    with responding(redis_url) as api:
        yield api


@pytest.fixture
def other(redis_url: str) -> Iterator[Api]:
    """A second gateway on the same Redis."""
    with responding(redis_url) as api:
        api.backend.gateway = "other"
        yield api


def fetch(api: Api, id_: str, **query: object) -> httpx.Response:
    return api.http.get(f"{RESPONSES}/{id_}", params=query)


def missing(answer: httpx.Response) -> None:
    assert answer.status_code == 404
    assert check_error(answer.content)["code"] == "not_found"


def status(api: Api, id_: str) -> str:
    return check_response(fetch(api, id_).content)["status"]


def endless(api: Api) -> None:
    """The model says three tokens, then nothing until it is cancelled."""
    api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=3)


def test_any_gateway_knows_a_response_until_it_is_deleted(api: Api, other: Api) -> None:
    made = plain(api)
    assert check_response(fetch(other, made["id"]).content) == made
    from_stream = streamed(api)
    assert check_response(fetch(other, from_stream["id"]).content) == from_stream
    gone = other.http.delete(f"{RESPONSES}/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
    missing(fetch(api, made["id"]))
    missing(api.http.delete(f"{RESPONSES}/{made['id']}"))
    with sdk(api) as client:
        assert client.responses.retrieve(from_stream["id"]).output_text == ANSWER
        client.responses.delete(from_stream["id"])
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(from_stream["id"])


def test_a_restarted_gateway_knows_it_too(redis_url: str) -> None:
    with responding(redis_url) as api:
        made = plain(api)
    with responding(redis_url) as api:
        assert check_response(fetch(api, made["id"]).content) == made
        assert plain(api, previous_response_id=made["id"])["previous_response_id"] == made["id"]


def test_another_team_sees_nothing(redis_url: str) -> None:
    with responding(redis_url, TEAMS) as api:
        made = plain(api)
        with httpx.Client(
            base_url=api.url, headers={"authorization": "Bearer sk-b"}, timeout=PATIENCE_S
        ) as http:
            path = f"{RESPONSES}/{made['id']}"
            for answer in (
                http.get(path),
                http.delete(path),
                http.post(f"{path}/cancel"),
                http.get(f"{path}/input_items"),
            ):
                missing(answer)
            body = {"model": MODEL, "input": "x", "previous_response_id": made["id"]}
            answer = http.post(RESPONSES, json=body)
            assert check_error(answer.content)["code"] == "previous_response_not_found"
            reference = {"type": "item_reference", "id": made["output"][0]["id"]}
            answer = http.post(RESPONSES, json={"model": MODEL, "input": [reference]})
            missing(answer)
        assert check_response(fetch(api, made["id"]).content) == made


def test_what_is_not_stored_is_not_there(api: Api) -> None:
    made = plain(api, store=False)
    missing(fetch(api, made["id"]))
    answer = post(api, previous_response_id=made["id"])
    assert answer.status_code == 400
    assert check_error(answer.content)["code"] == "previous_response_not_found"


@pytest.mark.parametrize("id_", ["resp_", "x", "resp_" + "0" * 32, "resp_" + "g" * 32, "%00", "{}"])
def test_what_is_no_id_is_a_404(api: Api, id_: str) -> None:
    missing(fetch(api, id_))
    missing(api.http.delete(f"{RESPONSES}/{id_}"))
    missing(api.http.post(f"{RESPONSES}/{id_}/cancel"))


def test_a_conversation_goes_on_from_any_of_its_responses(api: Api, other: Api) -> None:
    first = plain(api, input="one", instructions="First.")
    second = plain(other, input="two", previous_response_id=first["id"])
    plain(api, input="three", previous_response_id=second["id"], instructions="Third.")
    said = f"<|im_start|>assistant\n{ANSWER}<|im_end|>\n"
    assert prompt(api) == (
        "<|im_start|>system\nThird.<|im_end|>\n"
        f"<|im_start|>user\none<|im_end|>\n{said}"
        f"<|im_start|>user\ntwo<|im_end|>\n{said}"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    plain(api, input="else", previous_response_id=first["id"])
    assert "two" not in prompt(api)


def test_a_conversation_with_a_hole_is_not_carried_on(api: Api) -> None:
    first = plain(api)
    second = plain(api, previous_response_id=first["id"])
    api.http.delete(f"{RESPONSES}/{first['id']}")
    answer = post(api, previous_response_id=second["id"])
    assert answer.status_code == 400
    assert check_error(answer.content)["param"] == "previous_response_id"


def test_a_conversation_that_is_too_long_is_refused(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_DEPTH", 2)
    last = plain(api)
    last = plain(api, previous_response_id=last["id"])
    last = plain(api, previous_response_id=last["id"])
    answer = post(api, previous_response_id=last["id"])
    assert answer.status_code == 400
    assert "too long" in check_error(answer.content)["message"]


def test_input_items_are_listed_page_by_page(api: Api) -> None:
    texts = [f"number {n}" for n in range(7)]
    made = plain(api, input=[{"role": "user", "content": text} for text in texts])
    with sdk(api) as client:
        items = client.responses.input_items
        latest = [item.content[0].text for item in items.list(made["id"])]
        assert latest == texts[::-1]
        page = items.list(made["id"], limit=3, order="asc")
        assert page.has_more
        assert [item.content[0].text for item in page] == texts  # the SDK turns the pages
        ids = [item.id for item in items.list(made["id"], order="asc")]
        assert len(set(ids)) == 7
        after = items.list(made["id"], order="asc", after=ids[4]).data
        assert [item.id for item in after] == ids[5:]
    path = f"{RESPONSES}/{made['id']}/input_items"
    for param, value in (("limit", 0), ("limit", "x"), ("order", "up"), ("after", "msg_x")):
        answer = api.http.get(path, params={param: value})
        assert answer.status_code == 400
        assert check_error(answer.content)["param"] == param


def test_a_text_as_input_is_listed_as_a_message(api: Api) -> None:
    made = plain(api, input="Hello?")
    (item,) = api.http.get(f"{RESPONSES}/{made['id']}/input_items").json()["data"]
    assert item == {
        "id": f"msg_{made['id'][5:]}i00000",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Hello?"}],
    }


def test_the_oldest_go_when_a_teams_share_is_full(
    redis_url: str, session_redis: RedisServer
) -> None:
    with responding(redis_url, GatewaySettings(response_store_bytes=65_536)) as api:
        made = [plain(api, input=f"{n} " + "word " * 300)["id"] for n in range(30)]
        kept = [id_ for id_ in made if fetch(api, id_).status_code == 200]
        assert kept == made[-len(kept) :]
        assert 5 < len(kept) < 30
        redis = session_redis.client
        assert int(redis.hget("fb:{r:}:sizes", "")) <= 65_536
        assert redis.zcard("fb:{r:}:index") == len(kept)
        assert "forebay_responses_evicted_total" in api.http.get("/metrics").text
        too_large = post(api, input="word " * 4000)
        assert too_large.status_code == 400
        assert check_error(too_large.content)["param"] == "input"
        assert "store" in check_error(too_large.content)["message"]


def test_so_many_are_kept_and_each_for_its_time(
    api: Api, session_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_COUNT", 3)
    made = [plain(api)["id"] for _ in range(5)]
    assert [fetch(api, id_).status_code for id_ in made] == [404, 404, 200, 200, 200]
    redis = session_redis.client
    key = f"fb:{{r:}}:response:{made[-1]}"
    assert 604_000_000 < redis.pttl(key) <= 604_800_000
    # What expired leaves the books with the next response.
    redis.delete(key)
    redis.zadd("fb:{r:}:index", {made[-1]: 1})
    plain(api)
    assert redis.zscore("fb:{r:}:index", made[-1]) is None
    assert redis.hget("fb:{r:}:sizes", made[-1]) is None


def test_the_books_are_exact_after_any_deletion(api: Api, session_redis: RedisServer) -> None:
    for made in [plain(api), plain(api, background=True)]:
        wait_until(lambda id_=made["id"]: status(api, id_) == "completed", "it ends")
        api.http.delete(f"{RESPONSES}/{made['id']}")
    redis = session_redis.client
    assert redis.hgetall("fb:{r:}:sizes") == {b"": b"0"}
    assert not redis.exists("fb:{r:}:index", "fb:{r:}:running")


def test_without_redis_only_what_is_not_stored_is_answered() -> None:
    with responding("") as api:
        assert plain(api, store=False)["status"] == "completed"
        for fields in ({}, {"background": True}, {"previous_response_id": "resp_" + "0" * 32}):
            answer = post(api, **fields)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert check_error(answer.content)["code"] == "bus_unavailable"
        failed = streamed(api)
        assert failed["status"] == "failed"
        assert failed["output"][0]["content"][0]["text"] == ANSWER


def test_a_full_redis_is_a_503(redis_server: RedisServer) -> None:
    with responding(redis_server.url) as api:
        redis_server.client.config_set("maxmemory", "1")
        answer = post(api)
        assert answer.status_code == 503
        check_error(answer.content)
        assert plain(api, store=False)["status"] == "completed"
        redis_server.client.config_set("maxmemory", "0")
        assert plain(api)["status"] == "completed"


def test_a_background_response_is_asked_for_until_it_has_ended(api: Api, other: Api) -> None:
    with sdk(api) as client, sdk(other) as elsewhere:
        made = client.responses.create(model=MODEL, input="hi", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        wait_until(lambda: elsewhere.responses.retrieve(made.id).status == "completed", "it ends")
        assert elsewhere.responses.retrieve(made.id).output_text == ANSWER
        assert elsewhere.responses.cancel(made.id).status == "completed"
        later = client.responses.create(
            model=MODEL, input="and?", previous_response_id=made.id, background=True
        )
        wait_until(lambda: client.responses.retrieve(later.id).status == "completed", "it ends")
    assert ANSWER in prompt(api)


def test_one_that_runs_shows_so_and_is_no_previous_response(api: Api, other: Api) -> None:
    endless(api)
    made = plain(api, background=True)
    wait_until(lambda: status(other, made["id"]) == "in_progress", "it runs")
    answer = post(other, previous_response_id=made["id"])
    assert answer.status_code == 400
    assert "completed" in check_error(answer.content)["message"]
    assert "forebay_background_responses 1.0" in api.http.get("/metrics").text


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_any_gateway_can_end_one_that_runs(api: Api, other: Api, end: str) -> None:
    endless(api)
    made = plain(api, background=True)
    wait_until(lambda: status(api, made["id"]) == "in_progress", "it runs")
    if end == "cancel":
        answer = other.http.post(f"{RESPONSES}/{made['id']}/cancel")
        assert check_response(answer.content)["status"] == "cancelled"
    else:
        other.http.delete(f"{RESPONSES}/{made['id']}")
    wait_until(lambda: bool(api.backend.cancelled), "the work ends")
    if end == "cancel":
        assert status(api, made["id"]) == "cancelled"
        answer = api.http.post(f"{RESPONSES}/{made['id']}/cancel")
        assert answer.json()["status"] == "cancelled"
    else:
        missing(fetch(api, made["id"]))


def test_a_response_in_the_foreground_cannot_be_cancelled(api: Api) -> None:
    made = plain(api)
    answer = api.http.post(f"{RESPONSES}/{made['id']}/cancel")
    assert answer.status_code == 400
    check_error(answer.content)


def test_one_that_fails_says_why(api: Api) -> None:
    api.backend.script = lambda job, index: Play(
        api.backend.answer, error=ValueError("secret"), error_after=4
    )
    made = plain(api, background=True)
    wait_until(lambda: status(api, made["id"]) == "failed", "it fails")
    failed = check_response(fetch(api, made["id"]).content)
    assert failed["error"]["code"] == "server_error"
    assert "secret" not in failed["error"]["message"]
    assert failed["output"][0]["status"] == "incomplete"


def test_a_stream_that_breaks_off_is_stored_as_the_client_has_seen_it(api: Api, other: Api) -> None:
    api.backend.script = lambda job, index: Play(
        api.backend.answer, error=ValueError("secret"), error_after=4
    )
    seen = streamed(api)
    assert seen["status"] == "failed"
    assert check_response(fetch(other, seen["id"]).content) == seen
    answer = post(other, previous_response_id=seen["id"])
    assert check_error(answer.content)["param"] == "previous_response_id"
    missing(fetch(other, streamed(api, store=False)["id"]))


def test_a_limit_that_is_reached_refuses_a_background_response_at_once(
    api: Api, session_redis: RedisServer
) -> None:
    async def refused(_: object) -> None:
        raise RateLimitError("The team red has reached its limit.", retry_after_s=7.0)

    keys_before = session_redis.client.dbsize()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedGeneration, "__aenter__", refused)
        for fields in ({}, {"stream": True}):
            answer = post(api, background=True, **fields)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "7"
            check_error(answer.content)
    assert session_redis.client.dbsize() == keys_before
    assert plain(api, background=True)["status"] == "queued"


def test_a_background_response_that_cannot_be_stored_leaves_no_work_open() -> None:
    with responding("") as api:
        assert post(api, background=True).status_code == 503
        assert not api.backend.running
        assert len(api.backend.cancelled) == 1


def test_so_many_run_at_once_and_no_more(redis_url: str) -> None:
    settings = GatewaySettings(max_background_responses=2)
    with responding(redis_url, settings) as api, responding(redis_url, settings) as other:
        endless(api)
        made = [plain(api, background=True)["id"] for _ in range(2)]
        full = post(api, background=True)
        assert full.status_code == 503
        assert int(full.headers["retry-after"]) >= 1
        team = post(other, background=True)
        assert team.status_code == 429
        assert int(team.headers["retry-after"]) >= 1
        other.http.post(f"{RESPONSES}/{made[0]}/cancel")
        assert plain(other, background=True)["status"] == "queued"


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the store has answered, by response, whether it is still to run: all the time."""
    found, beat = Counter[str](), store.ResponseStore.beat

    async def counted(self: store.ResponseStore, team: str, id_: str, *rest: str) -> bool:
        answer = await beat(self, team, id_, *rest)
        found[id_] += 1
        return answer

    monkeypatch.setattr(runs, "BEAT_S", 0.01)
    monkeypatch.setattr(store.ResponseStore, "beat", counted)
    return found


def ends_when_cancelled(api: Api, id_: str) -> None:
    before = len(api.backend.cancelled)
    api.http.post(f"{RESPONSES}/{id_}/cancel")
    wait_until(lambda: len(api.backend.cancelled) > before, "the work ends")


def test_one_that_is_not_stored_yet_is_not_taken_for_ended(
    api: Api, beats: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endless(api)
    first, begin = plain(api, background=True), store.ResponseStore.begin

    async def late(self: store.ResponseStore, team: str, id_: str, *rest: object) -> None:
        while not beats[id_]:  # noqa: ASYNC110  it is a count
            await asyncio.sleep(0.001)
        await begin(self, team, id_, *rest)

    monkeypatch.setattr(store.ResponseStore, "begin", late)
    second = plain(api, background=True)
    wait_until(lambda: status(api, second["id"]) == "in_progress", "it runs")
    for made in (first, second):
        ends_when_cancelled(api, made["id"])


def test_one_that_has_just_failed_is_not_stopped_once_more(
    api: Api, beats: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    endless(api)
    first, settle = plain(api, background=True), store.ResponseStore.settle

    async def slow(self: store.ResponseStore, team: str, id_: str, *rest: object) -> bool:
        done, before = await settle(self, team, id_, *rest), beats[id_]
        while beats[id_] < before + 2:  # noqa: ASYNC110  the second is asked for after the end
            await asyncio.sleep(0.001)
        return done

    monkeypatch.setattr(store.ResponseStore, "settle", slow)
    api.backend.script = lambda job, index: Play([], error=EngineError("no"))
    failed = plain(api, background=True)
    wait_until(lambda: status(api, failed["id"]) == "failed", "it fails")
    alone = "forebay_background_responses 1.0"
    wait_until(lambda: alone in api.http.get("/metrics").text, "it is over")
    ends_when_cancelled(api, first["id"])


def test_a_gateway_that_dies_leaves_a_failed_response(
    redis_url: str, other: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SILENCE_S", 0.3)

    async def silent(*_: object) -> bool:
        return True

    with responding(redis_url) as api:
        endless(api)
        monkeypatch.setattr(store.ResponseStore, "beat", silent)
        made = plain(api, background=True)
        wait_until(lambda: status(other, made["id"]) == "failed", "its silence is noticed")
        error = check_response(fetch(other, made["id"]).content)["error"]
        assert "has gone" in error["message"]


def test_a_gateway_that_is_shut_down_says_so(redis_url: str, other: Api) -> None:
    with responding(redis_url) as api:
        endless(api)
        made = plain(api, background=True)
        wait_until(lambda: status(other, made["id"]) == "in_progress", "it runs")
    error = check_response(fetch(other, made["id"]).content)["error"]
    assert "shut down" in error["message"]


def test_a_background_stream_is_taken_up_anywhere(api: Api, other: Api) -> None:
    raw = post(api, background=True, stream=True).content
    response = check_events(raw, background=True)
    events = split_events(raw)
    for number in (0, 5, len(events) - 2):
        rest = fetch(other, response["id"], stream="true", starting_after=number).content
        assert split_events(rest, number + 1) == events[number + 1 :]
    for number in (len(events) - 1, len(events) + 5):
        rest = fetch(other, response["id"], stream="true", starting_after=number)
        assert (rest.status_code, rest.content) == (200, b""), "all of it was had"
    assert check_events(fetch(other, response["id"], stream="true").content, background=True)
    assert check_response(fetch(other, response["id"]).content) == response
    for fields in ({}, {"background": True}):
        made = plain(api, **fields)
        answer = fetch(api, made["id"], stream="true")
        assert answer.status_code == 400
        assert check_error(answer.content)["param"] == "stream"
    answer = fetch(api, response["id"], stream="true", starting_after="x")
    assert check_error(answer.content)["param"] == "starting_after"


def test_a_client_may_leave_a_background_stream_and_come_back(api: Api, other: Api) -> None:
    gate: list[int] = [5]
    api.backend.script = lambda job, index: Play(api.backend.answer, pause_at=gate)
    with sdk(api) as client, sdk(other) as elsewhere:
        stream = client.responses.create(model=MODEL, input="hi", background=True, stream=True)
        seen = [event for event, _ in zip(stream, range(6), strict=False)]
        stream.close()
        again = elsewhere.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        first = next(again)
        gate.clear()
        rest = [first, *again]
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    assert rest[-1].response.output_text == ANSWER


def follow(api: Api, id_: str) -> Callable[[], bytes]:
    """Streams a response in a thread, once it has begun; call the result for all of it."""
    raw: list[bytes] = []
    begun = threading.Event()

    def read() -> None:
        url = f"{api.url}{RESPONSES}/{id_}"
        with httpx.stream("GET", url, params={"stream": "true"}, timeout=PATIENCE_S) as answer:
            for part in answer.iter_raw():
                raw.append(part)
                begun.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(PATIENCE_S)

    def wait() -> bytes:
        thread.join(20)
        return b"".join(raw)

    return wait


@pytest.mark.parametrize("end", ["cancel", "delete", "shutdown"])
def test_a_stream_whose_response_ends_otherwise_ends_too(
    redis_url: str, other: Api, end: str
) -> None:
    with responding(redis_url) as api:
        endless(api)
        opened = httpx.stream(
            "POST",
            api.url + RESPONSES,
            json={"model": MODEL, "input": "x", "background": True, "stream": True},
            timeout=PATIENCE_S,
        )
        with opened as answer:
            head = next(answer.iter_text())
        id_ = "resp_" + head.partition('"id":"resp_')[2][:32]
        wait_until(lambda: status(api, id_) == "in_progress", "it runs")
        rest = follow(other, id_)
        if end == "cancel":
            api.http.post(f"{RESPONSES}/{id_}/cancel")
        elif end == "delete":
            api.http.delete(f"{RESPONSES}/{id_}")
    last = check_events(rest(), background=True)
    if end == "cancel":
        assert last["code"] == "response_cancelled"
    elif end == "delete":
        assert last["type"] == "error"
    else:
        assert last["status"] == "failed"


def test_a_stream_with_too_many_events_says_so(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_EVENT_BYTES", 4000)
    last = check_events(post(api, background=True, stream=True).content, background=True)
    assert last["code"] == "stream_too_long"


def test_a_client_that_does_not_stream_costs_no_events(
    api: Api, session_redis: RedisServer
) -> None:
    made = plain(api, background=True)
    wait_until(lambda: status(api, made["id"]) == "completed", "it ends")
    assert not session_redis.client.exists(f"fb:{{r:}}:events:{made['id']}")
    assert time.time() - made["created_at"] < 60
