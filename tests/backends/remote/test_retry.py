"""What is sent again after a lost connection, and when."""

from itertools import pairwise

from penstock.backends.remote.endpoints import TcpEndpoint
from penstock.backends.remote.retry import REPEAT_PAUSE_S_MAX, Repetition
from penstock.service import Peek


def test_a_request_that_is_lost_repeatedly_is_repeated_with_longer_pauses():
    repetition = Repetition(TcpEndpoint("localhost", 1), Peek("orders"), reconnect_s=10.0)
    pauses_s = [repetition.pause_s() for _ in range(12)]
    assert pauses_s[0] == 0.0
    assert all(earlier < later for earlier, later in pairwise(pauses_s[:7]))
    assert pauses_s[-1] == REPEAT_PAUSE_S_MAX
