"""How a real worker uses its store: which queues it pulls from, and with how many commands."""

import pytest
import redis

from penstock.backends.redis import scripts
from penstock.service import Stats
from tests.tasks.conftest import until


def visible(module, queue):
    return module.app.service.execute(Stats(queue)).visible


def test_a_worker_pulls_only_from_the_queues_that_are_named(make_shop, file_url):
    shop = make_shop(
        file_url,
        """
        @app.task(queue="a")
        def first(name: str) -> None:
            note(name)

        @app.task(queue="b")
        def second(name: str) -> None:
            note(name)

        @app.task(queue="c")
        def third(name: str) -> None:
            note(name)
        """,
    )
    module = shop.app()
    for task, name in ((module.first, "one"), (module.second, "two"), (module.third, "three")):
        task.push(name)
    code, _, err = shop.run("worker", "shop:app", "--burst", "--queues", "a,c,d")
    assert (code, shop.names()) == (0, {"one", "three"})
    assert ": 2 tasks of a, c, d; " in err
    assert err.count("no task of shop:app is declared for the queue") == 1
    assert "for the queue 'd'" in err
    assert [visible(module, queue) for queue in "abc"] == [0, 1, 0]
    code, _, err = shop.run("worker", "shop:app", "--queues", ",")
    assert (code, "--queues ',' names no queue" in err) == (2, True)
    module.app.close()


def test_a_queue_of_its_own_is_not_held_up_by_one_that_is_always_full(make_shop, file_url):
    """What the guide advises against starvation: tasks of a low priority in another queue."""
    shop = make_shop(
        file_url,
        """
        @app.task(priority=9)
        def urgent(number: int) -> None:
            note("urgent")
            urgent.push(number)

        @app.task(queue="low")
        def low(number: int) -> None:
            note("low")
        """,
    )
    module = shop.app()
    # As many as the worker runs at a time, each of which pushes its successor.
    module.urgent.push_many([(number,) for number in range(16)])
    module.low.push_many([(number,) for number in range(20)])
    shop.start("--threads", "2")
    until(lambda: shop.noted("low") == 20)
    assert module.app.service.execute(Stats("tasks")).messages >= 16
    module.app.close()


@pytest.mark.service("redis-server")
def test_one_thread_gets_its_tasks_in_advance_and_they_are_deleted_in_batches(
    make_shop, redis_server
):
    redis_server.ask("FLUSHALL")
    # A task that calls the system, as `note` does, may take as long as a command to Redis: then
    # there is nothing to batch.
    shop = make_shop(
        redis_server.url,
        """
        @app.task
        def short(number: int) -> None: ...
        """,
    )
    module = shop.app()
    count = 2_000
    module.short.push_many([(number,) for number in range(count)])
    with redis.Redis(port=redis_server.port) as client:
        client.config_set("slowlog-max-len", 100_000)
        client.config_set("slowlog-log-slower-than", 0)
        client.slowlog_reset()
        code, _, err = shop.run("worker", "shop:app", "--burst", "--threads", "1")
        commands = [each["command"].split() for each in client.slowlog_get(100_000)]
        client.config_set("slowlog-log-slower-than", 10_000)
        client.slowlog_reset()
    assert code == 0, err
    assert f"stopped after {count:,} done, 0 retried, 0 failed" in err
    assert module.app.service.execute(Stats("tasks")).messages == 0
    calls = [each[1].decode() for each in commands if each[0] == b"EVALSHA"]
    pulls, deletes = (calls.count(scripts.SCRIPTS[name].sha) for name in ("pull", "receipts"))
    # One by one there would be 2,000 of each.
    assert 0 < pulls < count / 10
    assert 0 < deletes < count / 10
    module.app.close()
