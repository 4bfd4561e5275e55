"""What a worker puts on the books in the place of a gateway that is gone, by a real Redis."""

from typing import Any, cast

import msgspec
import pytest
from forebay_shared import keys
from forebay_shared.books import Hold, Rates, UsageRecord, admission, decode_record
from forebay_shared.bus import Publisher
from forebay_shared.link import Value
from forebay_shared.sampling import SamplingParams
from forebay_shared.scripts import Script
from forebay_shared.settings import Secret
from forebay_shared.supervise import Supervisor
from forebay_shared.wire import Done, Failed, FinishReason, Reply, Started, Submit, Usage
from forebay_worker.metering import Metering

USAGE = Usage(prompt_tokens=3, completion_tokens=5)
STARTED = Started("r", 1, 0, 0, 0.0)


def _submit() -> Submit:
    sampling = SamplingParams()
    return Submit(request_id="r", attempt=1, gateway="g", prompt=b"", sampling=sampling)


def _done(reason: FinishReason) -> Done:
    return Done("r", 1, 0, reason, None, USAGE)


def _hold() -> Hold:
    return Hold(
        record=UsageRecord(id="r", team="red"),
        rates=Rates(),
        slots=[],
        input_tokens=3,
        output_tokens=9,
        cost=0,
        plan=msgspec.Raw(msgspec.msgpack.encode([0])),
    )


@pytest.mark.parametrize(
    ("replies", "outcome", "output"),
    [
        ([STARTED, _done("length")], "completed", 5),
        ([STARTED, _done("stop")], "completed", 5),
        ([STARTED, _done("abort")], "cancelled", 5),
        ([Failed("r", 1, "worker_draining", "It leaves.", retryable=True)], "cancelled", 0),
        ([Failed("r", 1, "engine_error", "It failed.")], "error", 0),
    ],
)
async def test_an_ended_request_of_a_dead_gateway_is_settled_as_it_ended(
    redis_url: str, replies: list[Reply], outcome: str, output: int
) -> None:
    publisher = Publisher(Secret(redis_url))
    metering = Metering(publisher)
    async with Supervisor("test") as tasks:
        tasks.start("publisher", publisher.run())
        names, arguments = admission(_hold())
        await Script("admit").send(publisher, names, arguments)
        metering.submitted(_submit())
        for reply in replies:
            metering.replied(reply)
        metering.gateway_gone("g")

        rows: Value = []
        while not isinstance(rows, list) or not rows:
            rows = await publisher.call("XREVRANGE", keys.records(), "+", "-", "COUNT", 1)
        await publisher.call("DEL", keys.records())  # the books stay, but not in this Redis
    found = decode_record(cast(list[Any], rows)[0][1][1])
    assert (found.outcome, found.output_tokens) == (outcome, output)
    assert len(metering) == 0
