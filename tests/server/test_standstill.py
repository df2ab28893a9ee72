"""Row 27: a server whose process stood still goes on, with pulls that wait and much that is due."""

import signal
import threading
import time

from tests.server.conftest import TIMEOUT_S, until
from tests.server.test_one_store import connect, served

DELAY_S = 0.5


def test_a_server_that_was_stopped_by_a_signal_serves_what_became_due_meanwhile(store):
    with served(store) as server, connect(store) as queues:
        queues.create("q")
        claims = []
        threads = [
            threading.Thread(target=lambda: claims.append(queues.pull("q", wait=20)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: queues.stats("q").waiting_pulls == 2)
        messages = [
            {"body": f"{kind}{number}", "delay": DELAY_S, "ttl": ttl}
            for number in range(300)
            for kind, ttl in (("lasting", None), ("short", DELAY_S + 0.1))
        ]
        queues.push_many("q", messages)
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(DELAY_S + 0.25)
        server.process.send_signal(signal.SIGCONT)
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert sorted(claim.body for claim in claims if claim) == [b"lasting0", b"lasting1"]
        until(lambda: queues.stats("q").messages == 300)
        stats = queues.stats("q")
        assert (stats.visible, stats.in_flight, stats.delayed) == (298, 2, 0)
        assert server.stop() == 0
