"""What is sent again after a lost connection, and when."""

from itertools import pairwise

import pytest

from penstock.backends.remote.endpoints import TcpEndpoint
from penstock.backends.remote.retry import REPEAT_PAUSE_S_MAX, ConnectionLost, repeated
from penstock.errors import BackendLost
from penstock.service import Peek, Push
from penstock.steps import run_calls


class LosingClient:
    """A client whose every channel is lost, until the given attempt; it does not really wait."""

    endpoint = TcpEndpoint("localhost", 1)

    def __init__(self, losses, may_be_done=True, reconnect_s=10.0):
        self.reconnect_s = reconnect_s
        self.losses = losses
        self.may_be_done = may_be_done
        self.pauses_s = []

    def check_open(self):
        pass

    def connect(self, connect_s):
        raise AssertionError("a channel is reopened")

    def reopen(self, lost):
        return self

    def exchange(self, command):
        if len(self.pauses_s) <= self.losses:
            raise ConnectionLost(self.may_be_done, "it broke", 0.0)
        return "done"

    def sleep(self, seconds):
        self.pauses_s.append(seconds)

    def repeat(self, command):
        return run_calls(repeated(self, command, self, ConnectionLost(False, "it broke", 0.0)))


def test_a_request_that_is_lost_repeatedly_is_repeated_with_longer_pauses():
    client = LosingClient(11)
    assert client.repeat(Peek("orders")) == "done"
    assert len(client.pauses_s) == 12
    assert client.pauses_s[0] == 0.0
    assert all(earlier < later for earlier, later in pairwise(client.pauses_s[:7]))
    assert client.pauses_s[-1] == REPEAT_PAUSE_S_MAX


def test_a_request_is_repeated_until_it_may_have_been_done():
    assert LosingClient(3, may_be_done=False).repeat(Push("orders", b"x")) == "done"
    with pytest.raises(BackendLost, match="whether this Push was done is unknown"):
        LosingClient(3).repeat(Push("orders", b"x"))


def test_a_request_is_not_repeated_for_ever():
    with pytest.raises(BackendLost, match="at every attempt"):
        LosingClient(3, reconnect_s=-1.0).repeat(Peek("orders"))
