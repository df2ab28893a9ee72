"""Row 20: many requests at one instant are served in many turns of the event loop."""

import asyncio
import itertools
import time

from penstock.backends.scheduler import (
    KINDS_MAX,
    LONG_S,
    MEAN_REQUESTS,
    TURN_S,
    RunQueue,
    run_queue,
)
from penstock.server.http import HttpServer, kind_of
from penstock.server.request import Request
from penstock.server.response import response


def learn_slow(queue, kind):
    for _ in range(2):
        queue.note(kind, LONG_S)


def take_a_turn():
    until_s = time.perf_counter() + TURN_S
    while time.perf_counter() <= until_s:
        pass


def test_a_kind_of_request_is_slow_if_its_requests_take_long_on_average():
    async def run():
        queue = RunQueue(asyncio.get_running_loop())
        assert not queue.is_slow("List")
        queue.note("List", LONG_S)
        # It may have been interrupted.
        assert not queue.is_slow("List")
        learn_slow(queue, "List")
        assert queue.is_slow("List")
        assert not queue.is_slow("Send")
        # However many kinds clients invent, few are remembered.
        for number in range(KINDS_MAX):
            queue.note(str(number), LONG_S)
        assert not queue.is_slow("List")

    asyncio.run(run())


def test_a_kind_is_not_slow_any_more_when_its_requests_are_short_again():
    async def run():
        queue = RunQueue(asyncio.get_running_loop())
        learn_slow(queue, "Send")
        assert queue.is_slow("Send")
        for _ in range(2 * MEAN_REQUESTS):
            queue.note("Send", 0.0)
        assert not queue.is_slow("Send")

    asyncio.run(run())


def test_large_requests_are_of_one_kind_whatever_they_are_named():
    def kind(target, body=b""):
        return kind_of(Request("POST", "/", "", {"x-amz-target": target}, body))

    assert kind("a", bytes(20_000)) == kind("b", bytes(20_000))
    assert len({kind("a", bytes(20_000)), kind("a"), kind("b")}) == 3


def test_everything_on_one_event_loop_has_one_run_queue():
    async def find():
        return run_queue(asyncio.get_running_loop())

    async def both():
        return await find(), await find()

    first, second = asyncio.run(both())
    assert first is second
    assert asyncio.run(find()) is not first


def test_a_crowd_of_one_kind_does_not_delay_another_kind_and_other_callbacks():
    async def run():
        loop = asyncio.get_running_loop()
        queue = RunQueue(loop)
        done: list[object] = []

        def begin(name):
            done.append(name)
            take_a_turn()

        for _ in range(5):
            queue.add("List", lambda: begin("List"))
        queue.add("Send", lambda: begin("Send"))
        for turn in range(8):
            await asyncio.sleep(0)
            done.append(turn)
        return done

    # One of these takes a turn's time.
    done = asyncio.run(run())
    named = [each for each in done if type(each) is str]
    assert named == ["List", "Send", *["List"] * 4]
    assert not any(type(a) is str and type(b) is str for a, b in itertools.pairwise(done))


def test_steps_go_on_in_later_turns_when_the_time_is_over_or_one_fails():
    async def run():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)
        queue = RunQueue(loop)
        done: list[object] = []

        def long():
            done.append("a")
            take_a_turn()

        def fail():
            raise ValueError

        def again():
            done.append("b")
            if done.count("b") < 3:
                queue.add("steps", again)

        for step in (long, fail, again):
            queue.add("steps", step)
        waits = asyncio.ensure_future(queue.wait("steps"))
        for turn in range(6):
            await asyncio.sleep(0)
            done.append(turn)
        await waits
        return done

    assert asyncio.run(run()) == ["a", 0, 1, "b", 2, "b", 3, "b", 4, 5]


def test_a_server_answers_slow_requests_of_many_connections_in_turns():
    async def run():
        loop = asyncio.get_running_loop()
        turn = 0
        answered_in: list[int] = []

        def answer(given, connection):
            answered_in.append(turn)
            take_a_turn()
            return response(200, b"", b"{}", loop.time())

        def count_turns():
            nonlocal turn
            turn += 1
            loop.call_soon(count_turns)

        http = HttpServer(answer)
        listener = await loop.create_server(http, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        wires = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        count_turns()

        async def send(all_of):
            for _, writer in all_of:
                writer.write(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            for reader, _ in all_of:
                assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200 ")

        await send(wires[:1])
        await send(wires[:1])
        answered_in.clear()
        # The sockets of all of them are readable in the same turn.
        await send(wires)
        for _, writer in wires:
            writer.close()
        listener.close()
        await http.drain(0)
        return answered_in

    answered_in = asyncio.run(run())
    assert len(set(answered_in)) == len(answered_in) == 10
