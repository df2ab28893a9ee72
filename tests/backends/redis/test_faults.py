"""Redis is killed, stalled, flushed, full, fails over to a replica, or its clock jumps."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

import penstock
from penstock.errors import (
    BackendLost,
    InvalidReceipt,
    QueueDeleted,
    QueueNotFound,
    RequestError,
    StoreFull,
    UnavailableError,
)
from penstock.service import Batch, Claim, Push
from tests.backends.redis.servers import TIMEOUT_S, RedisServer, Sentinels, until
from tests.conftest import FULL

pytestmark = pytest.mark.service("redis-server")

ROUNDS = 20 if FULL else 2
CLIENT_TIMEOUT_S = 1
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
/* Adds the number of seconds in a file to the time of day. */
int gettimeofday(struct timeval *now, void *zone) {
    static int (*real)(struct timeval *, void *);
    if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
    int result = real(now, zone);
    FILE *file = fopen(getenv("JUMP_FILE"), "r");
    long seconds = 0;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    now->tv_sec += seconds;
    return result;
}
"""


class RedisLoad:
    """Threads that push and consume while Redis fails, and a ledger of their messages."""

    def __init__(self, url, producers=2, consumers=3):
        self.queues = penstock.connect(f"{url}?timeout={CLIENT_TIMEOUT_S}")
        self.queues.create("load", visibility_timeout=1)
        self.answered: list[str] = []
        self.seen: set[str] = set()
        # The epoch of the claim by which a message was deleted.
        self.deleted: dict[str, int] = {}
        self.back: list[str] = []
        self.slowest_s = 0.0
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._finish = threading.Event()
        self._producers = [threading.Thread(target=self._produce) for _ in range(producers)]
        self._consumers = [threading.Thread(target=self._consume) for _ in range(consumers)]
        for thread in [*self._producers, *self._consumers]:
            thread.start()

    def _timed(self, call):
        began_s = time.monotonic()
        try:
            return call()
        except UnavailableError:
            threading.Event().wait(0.02)
            return None
        except BaseException as error:
            self.errors.append(error)
            self._stop.set()
            self._finish.set()
            return None
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)

    def _produce(self):
        number = 0
        while not self._stop.is_set():
            number += 1
            body = f"{threading.get_ident()}-{number}"
            reply = self._timed(lambda body=body: self.queues.push("load", body))
            if reply is not None:
                self.answered.append(reply.id)

    def _consume(self):
        while not self._finish.is_set():
            claim = self._timed(lambda: self.queues.pull("load", wait=0.2))
            if claim is None:
                continue
            self.seen.add(claim.id)
            if claim.epoch > self.deleted.get(claim.id, claim.epoch):
                self.back.append(claim.id)
            if self._timed(lambda claim=claim: self._delete(claim)):
                self.deleted[claim.id] = claim.epoch

    def _delete(self, claim):
        try:
            return self.queues.delete(claim)
        except InvalidReceipt:
            return False

    def _is_empty(self):
        with suppress(UnavailableError):
            return self.queues.stats("load").messages == 0
        return False

    def end(self):
        """Stops the producers and waits until every answered message is deleted."""
        self._stop.set()
        for thread in self._producers:
            thread.join(TIMEOUT_S)
        until(lambda: self.errors or self._is_empty())
        self._finish.set()
        for thread in self._consumers:
            thread.join(TIMEOUT_S)
        self.queues.close()
        assert self.errors == []
        assert set(self.answered) <= self.seen
        assert self.deleted
        assert self.back == []
        # A call may wait for a connection, for its answer, and for moves of dead letters.
        assert self.slowest_s < 3 * CLIENT_TIMEOUT_S + 15


def test_nothing_answered_is_lost_when_redis_is_killed_and_restarted_under_load(own_redis):
    """Row 12: Redis killed with -9 and started again, appendfsync always: nothing answered is lost.

    No deleted message comes back, no message is stuck, no call hangs.
    """
    load = RedisLoad(own_redis.url)
    for _ in range(ROUNDS):
        before = len(load.answered)
        until(lambda before=before: load.errors or len(load.answered) > before + 50)
        own_redis.kill()
        own_redis.start()
    until(lambda: load.errors or len(load.answered) > before + 100)
    load.end()


def test_nothing_is_lost_and_no_caller_hangs_when_redis_stalls_under_load(own_redis):
    """Row 12: Redis stalls for longer than the timeout and continues: no loss, no hang."""
    load = RedisLoad(own_redis.url)
    for _ in range(ROUNDS // 2):
        before = len(load.answered)
        until(lambda before=before: load.errors or len(load.answered) > before + 50)
        with own_redis.stalled():
            # Longer than the timeout, so that unanswered calls fail.
            threading.Event().wait(CLIENT_TIMEOUT_S + 0.3)
    load.end()


def test_a_stalled_redis_is_an_error_within_the_timeout(own_redis):
    """Row 12: every call ends with BackendLost when its timeout is over."""
    with penstock.connect(f"{own_redis.url}?timeout=1") as queues:
        queues.create("orders")
        with own_redis.stalled():
            for call in (
                lambda: queues.push("orders", "x"),
                lambda: queues.pull("orders"),
                lambda: queues.stats("orders"),
                lambda: queues.create("others"),
            ):
                began_s = time.monotonic()
                with pytest.raises(BackendLost, match=r"redis://127\.0\.0\.1"):
                    call()
                # The default timeout would be 10 s.
                assert time.monotonic() - began_s < 10
        assert queues.stats("orders").messages <= 1


def test_a_pull_that_waits_survives_a_restart_of_redis(own_redis):
    """Row 12: a waiting pull waits again when Redis is back, and gets a message."""
    with penstock.connect(own_redis.url) as queues:
        queues.create("orders")
        found: list[Any] = []
        waiter = threading.Thread(target=lambda: found.append(queues.pull("orders", wait=60)))
        waiter.start()
        until(lambda: queues.stats("orders").waiting_pulls == 1)
        own_redis.kill()
        own_redis.start()
        queues.push("orders", "after the restart")
        waiter.join(TIMEOUT_S)
        assert [claim.body for claim in found] == [b"after the restart"]


def test_a_process_that_was_killed_while_it_waited_does_not_block_the_others(shared_redis):
    url = f"{shared_redis.url}?prefix=killed"
    code = f"import penstock; penstock.connect({url!r}).pull('orders', wait=600)"
    with penstock.connect(url) as queues:
        queues.create("orders")
        killed = subprocess.Popen([sys.executable, "-c", code])
        until(lambda: queues.stats("orders").waiting_pulls == 1)
        found: list[Any] = []
        waiter = threading.Thread(target=lambda: found.append(queues.pull("orders", wait=60)))
        waiter.start()
        until(lambda: queues.stats("orders").waiting_pulls == 2)
        killed.kill()
        killed.wait(TIMEOUT_S)
        began_s = time.monotonic()
        queues.push("orders", "for the other")
        waiter.join(TIMEOUT_S)
        assert [claim.body for claim in found] == [b"for the other"]
        assert time.monotonic() - began_s < 30


def test_a_process_that_stops_after_it_was_woken_does_not_keep_the_message(shared_redis):
    url = f"{shared_redis.url}?prefix=stopped"
    code = f"import penstock; penstock.connect({url!r}).pull('orders', wait=600)"
    with penstock.connect(url) as queues:
        queues.create("orders")
        stopped = subprocess.Popen([sys.executable, "-c", code])
        try:
            until(lambda: queues.stats("orders").waiting_pulls == 1)
            os.kill(stopped.pid, 19)
            found: list[Any] = []
            waiter = threading.Thread(target=lambda: found.append(queues.pull("orders", wait=60)))
            waiter.start()
            until(lambda: queues.stats("orders").waiting_pulls == 2)
            queues.push("orders", "for another")
            waiter.join(TIMEOUT_S)
            assert [claim.body for claim in found] == [b"for another"]
        finally:
            stopped.kill()
            stopped.wait(TIMEOUT_S)


def test_the_pull_that_waited_first_is_served_first_across_processes(shared_redis):
    url = f"{shared_redis.url}?prefix=first"
    code = (
        "import penstock, sys\n"
        f"claim = penstock.connect({url!r}).pull('orders', wait=60)\n"
        "print(claim.body.decode(), flush=True)"
    )
    with penstock.connect(url) as queues:
        queues.create("orders")
        waiting = []
        for count in (1, 2, 3):
            waiting.append(
                subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            )
            until(lambda count=count: queues.stats("orders").waiting_pulls == count)
        for number, process in enumerate(waiting):
            queues.push("orders", f"m{number}")
            assert process.communicate(timeout=TIMEOUT_S)[0] == f"m{number}\n"


def test_after_a_flush_commands_raise_queue_not_found_and_queues_can_be_created(own_redis):
    with penstock.connect(own_redis.url) as queues:
        queues.create("orders")
        queues.push("orders", "gone")
        held: Any = queues.pull("orders")
        failed: list[BaseException] = []

        def wait():
            try:
                queues.pull("orders", wait=60)
            except BaseException as error:
                failed.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        until(lambda: queues.stats("orders").waiting_pulls == 1)
        assert own_redis.ask("FLUSHALL") == "+OK"
        for call in (
            lambda: queues.push("orders", "x"),
            lambda: queues.pull("orders"),
            lambda: queues.delete(held),
            lambda: queues.stats("orders"),
        ):
            with pytest.raises(QueueNotFound, match="orders"):
                call()
        waiter.join(TIMEOUT_S)
        assert [type(error) for error in failed] == [QueueDeleted]
        assert queues.list() == []
        queues.create("orders")
        with pytest.raises(InvalidReceipt):
            queues.delete(held)
        queues.push("orders", "new")
        claim = queues.pull("orders")
        assert claim is not None
        assert queues.delete(claim) is True


def test_scripts_that_were_flushed_from_the_server_are_loaded_again(own_redis):
    with penstock.connect(own_redis.url) as queues:
        queues.create("orders")
        assert own_redis.ask("SCRIPT", "FLUSH") == "+OK"
        queues.push_many("orders", ["a", "b"])
        assert own_redis.ask("SCRIPT", "FLUSH") == "+OK"
        claims = queues.pull_many("orders", 2)
        assert own_redis.ask("SCRIPT", "FLUSH") == "+OK"
        replies = queues.service.execute(Batch([Push("orders", b"c"), claims[0]]))  # type: ignore[list-item]
        assert replies[0].duplicate is False
        assert queues.delete_many(claims) == [True, True]


def test_commands_wait_while_a_long_script_of_another_client_runs():
    """Row 12: Redis answers BUSY meanwhile, and executes nothing."""
    server = RedisServer("--busy-reply-threshold", "20")
    script = "local t=redis.call('TIME')[1]; while redis.call('TIME')[1]-t < 2 do end return 1"
    try:
        with penstock.connect(server.url) as queues:
            queues.create("orders")
            other = threading.Thread(target=server.ask, args=("EVAL", script, 0))
            other.start()
            until(lambda: server.ask("PING").startswith("-BUSY"))
            queues.push("orders", "x")
            claim = queues.pull("orders")
            assert claim is not None
            assert queues.delete(claim) is True
            other.join(TIMEOUT_S)
    finally:
        server.close()


def test_a_full_redis_refuses_pushes_and_its_messages_can_be_pulled_and_deleted():
    server = RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        with penstock.connect(server.url) as queues:
            queues.create("orders", max_body_bytes=100_000)
            pushed: list[str] = []

            def push():
                while len(pushed) < 1_000:
                    pushed.append(queues.push("orders", bytes(50_000)).id)

            with pytest.raises(StoreFull, match="maxmemory"):
                push()
            pulled = []
            while (claim := queues.pull("orders")) is not None:
                assert queues.delete(claim) is True
                pulled.append(claim.id)
            assert pulled == pushed
            queues.push("orders", "room again")
    finally:
        server.close()


def test_a_redis_that_evicts_whole_queues_is_refused_unless_that_is_accepted():
    server = RedisServer("--maxmemory", "30mb", "--maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(RequestError, match=r"policy allkeys-lru.*evictable=1"):
            penstock.connect(server.url)
        penstock.connect(f"{server.url}?evictable=1").close()
        # Keys without a time to live are not evicted by this one, and without a limit by none.
        for setting in ("maxmemory-policy volatile-lru", "maxmemory 0"):
            assert server.ask("CONFIG", "SET", *setting.split()) == "+OK"
            penstock.connect(server.url).close()
    finally:
        server.close()


def test_a_wrong_password_is_refused_and_not_shown(tmp_path):
    server = RedisServer("--requirepass", "s3cret%", ready="-NOAUTH Authentication required.")
    try:
        with pytest.raises(RequestError, match="Authentication required"):
            penstock.connect(server.url)
        with pytest.raises(RequestError) as caught:
            penstock.connect(f"redis://:wr0ng@127.0.0.1:{server.port}")
        assert "wr0ng" not in str(caught.value)
        with penstock.connect(f"redis://:s3cret%25@127.0.0.1:{server.port}") as queues:
            queues.create("orders")
        (tmp_path / "password").write_text("s3cret%\n")
        url = f"{server.url}?password_file={tmp_path / 'password'}"
        with penstock.connect(url) as queues:
            assert queues.list() == ["orders"]
    finally:
        server.close()


@pytest.fixture(scope="session")
def jump_shim(tmp_path_factory):
    """A library that makes the clock of a process jump."""
    directory = tmp_path_factory.mktemp("shim")
    (directory / "jump.c").write_text(SHIM)
    library = directory / "jump.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-o", library, directory / "jump.c", "-ldl"],
        check=True,
    )
    return library


@pytest.mark.parametrize("jump_s", [-86_400, -3_600, 3_600, 86_400])
def test_claims_and_delays_end_after_a_jump_of_the_clock(jump_shim, tmp_path, jump_s):
    """The time of a queue never goes back."""
    jump_file = tmp_path / "jump"
    jump_file.write_text("0")
    server = RedisServer(
        environment={**os.environ, "LD_PRELOAD": str(jump_shim), "JUMP_FILE": str(jump_file)}
    )
    try:
        with penstock.connect(server.url) as queues:
            queues.create("orders", visibility_timeout=1)
            queues.push("orders", "claimed")
            queues.push("orders", "delayed", delay=1)
            first = queues.pull("orders")
            assert first is not None
            jump_file.write_text(str(jump_s))
            queues.push("orders", "after")
            # Held for longer than the test takes: none of them comes again.
            found = [queues.pull("orders", wait=30, visibility_timeout=600) for _ in range(3)]
            assert sorted(claim.body for claim in found if claim is not None) == [
                b"after",
                b"claimed",
                b"delayed",
            ]
            again = next(claim for claim in found if claim and claim.body == b"claimed")
            assert (again.id, again.epoch) == (first.id, 2)
            with pytest.raises(InvalidReceipt):
                queues.delete(first)
            if jump_s < 0:
                assert again.deadline_ms >= first.deadline_ms
    finally:
        server.close()


def test_a_promoted_replica_serves_what_was_replicated():
    """Row 12: the master is killed, Sentinel promotes its replica: nothing replicated is lost."""
    with Sentinels() as sentinels:
        with penstock.connect(f"{sentinels.url}?replicas=1") as queues:
            queues.create("orders")
            pushed = [queues.push("orders", f"m{number}").id for number in range(20)]
        # The promoted replica has no replica, so replicas=1 could not be fulfilled any more.
        with penstock.connect(sentinels.url) as queues:
            assert queues.stats("orders").messages == 20
            sentinels.master.kill()
            claims: list[Claim] = []

            def has_all():
                with suppress(UnavailableError):
                    claims.extend(queues.pull_many("orders", 20))
                return len(claims) == 20

            until(has_all, 60)
            assert [claim.id for claim in claims] == pushed
            assert queues.delete_many(claims) == [True] * 20


def test_a_write_that_too_few_replicas_have_is_an_error(shared_redis):
    with (
        pytest.raises(BackendLost, match="fewer than 1 replicas"),
        penstock.connect(f"{shared_redis.url}?prefix=alone&replicas=1&timeout=1") as queues,
    ):
        queues.create("orders")
