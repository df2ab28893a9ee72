"""Errors of a broker that cannot be reached, or refuses a request: one sentence each."""

import subprocess
import threading

import pytest

import penstock
from penstock.backends.rabbitmq.target import read_target
from penstock.errors import (
    BackendLost,
    InvalidField,
    QueueExists,
    QueueFull,
    QueueNotFound,
    RequestError,
    UnsupportedOperation,
)
from penstock.url import read_url
from tests.ports import refusing_port
from tests.server.sqs.conftest import PENSTOCK

pytestmark = pytest.mark.service("rabbitmq-server")


def refused_by(url):
    with pytest.raises(penstock.PenstockError) as caught:
        penstock.connect(url)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)
    return caught.value


def test_a_wrong_password_names_the_user_and_not_the_password(rabbit):
    error = refused_by(f"amqp://guest:hunter2@127.0.0.1:{rabbit.port}/")
    assert type(error) is RequestError
    assert str(error) == (
        f"credentials: RabbitMQ at amqp://127.0.0.1:{rabbit.port} refuses the user 'guest' with "
        "this password"
    )


def test_a_wrong_vhost_is_named(rabbit):
    error = refused_by(f"amqp://guest:guest@127.0.0.1:{rabbit.port}/nowhere")
    assert type(error) is RequestError
    assert "has no vhost 'nowhere', or the user 'guest' may not use it" in str(error)


def test_a_refused_port_is_unavailable_and_may_be_tried_again():
    with refusing_port() as port:
        error = refused_by(f"amqp://guest:hunter2@127.0.0.1:{port}/")
    assert type(error) is BackendLost
    assert str(error) == f"amqp://127.0.0.1:{port}: cannot connect: Connection refused"


def test_a_host_with_several_addresses_that_refuse_has_the_same_error():
    with refusing_port() as port:
        error = refused_by(f"amqp://guest:hunter2@localhost:{port}/")
    assert str(error) == f"amqp://localhost:{port}: cannot connect: Connection refused"


def test_a_host_without_an_address_is_unavailable():
    error = refused_by("amqp://guest:hunter2@nowhere.invalid/")
    assert type(error) is BackendLost
    assert "amqp://nowhere.invalid:5672: cannot connect" in str(error)


def test_a_server_that_does_not_speak_amqp_has_its_own_error():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            link, _ = listener.accept()
            with link:
                link.recv(100)
                link.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        port = listener.getsockname()[1]
        error = refused_by(f"amqp://guest:hunter2@127.0.0.1:{port}/?timeout=5")
    assert isinstance(error, BackendLost)
    assert f"127.0.0.1:{port}" in str(error)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp:", "host or port is missing"),
        ("amqp://", "host or port is missing"),
        ("amqp:localhost", "host or port is missing"),
        ("amqp://guest:hunter2@host:port/", "host or port cannot be read"),
        ("amqp://guest:hunter2@host:99999/", "host or port cannot be read"),
        ("amqp://guest:hunter2?@host/", "special characters in the password as %XX"),
        ("amqp://guest:hunter2/@host/", "special characters in the password as %XX"),
        ("amqp://guest:hunter2#@host/", "special characters in the password as %XX"),
        ("amqp://guest:x@hunter2#y@host/", "%23 for a # in the password"),
        ("amqp://guest:hunter2@host/?colour=red", "has no option 'colour'"),
        ("amqp://guest:hunter2@host/?queues=lazy", "queues='lazy' is neither classic nor quorum"),
        ("amqp://guest:hunter2@host/?timeout=soon", "timeout='soon'"),
        ("amqp://guest:hunter2@host/?hold=-1", "hold='-1'"),
        ("amqp://guest:hunter2@host/?ca_file=x.pem", "ca_file is for amqps"),
        (
            "amqps://guest:hunter2@127.0.0.1:1/?ca_file=nowhere.pem",
            "ca_file='nowhere.pem' cannot be read",
        ),
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_the_password(url, shown):
    error = refused_by(url)
    assert isinstance(error, InvalidField)
    assert shown in str(error)


def test_tls_is_used_and_its_certificate_checked(rabbit, name):
    if not rabbit.certificate.is_file():
        pytest.skip("openssl is not installed")
    address = f"127.0.0.1:{rabbit.tls_port}"
    error = refused_by(f"amqps://guest:hunter2@{address}/")
    assert isinstance(error, BackendLost)
    assert "certificate verify failed" in str(error)
    url = f"amqps://guest:guest@{address}/?ca_file={rabbit.certificate}"
    with penstock.connect(url) as queues:
        queues.create(name)
        queues.push(name, b"x" * 300_000)
        assert [len(claim.body) for claim in queues.pull_many(name, 2)] == [300_000]
    error = refused_by(f"amqps://guest:hunter2@127.0.0.1:{rabbit.port}/?timeout=3")
    assert isinstance(error, BackendLost)


def test_a_command_prints_one_sentence_and_no_more():
    with refusing_port() as port:
        ended = subprocess.run(
            [PENSTOCK, "--url", f"amqp://guest:hunter2@127.0.0.1:{port}/", "stats"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode != 0
    (line,) = (ended.stdout + ended.stderr).splitlines()
    assert f"amqp://127.0.0.1:{port}: cannot connect" in line


def test_a_url_gives_user_password_and_vhost_unquoted():
    target = read_target(read_url("amqp://us%40er:p%2Fw@[::1]:7/v%2Fh?queues=quorum&hold=60"))
    assert (target.user, target.password, target.vhost) == ("us@er", "p/w", "v/h")
    assert (target.host, target.port, target.kind, target.hold_ms) == ("::1", 7, "quorum", 60_000)
    assert target.shown == "amqp://[::1]:7"
    plain = read_target(read_url("amqps://host"))
    assert (plain.user, plain.vhost, plain.port) == ("guest", "/", 5671)


def test_a_queue_that_another_client_made_with_other_arguments_is_refused(queues, name, amqp):
    amqp(lambda channel: channel.queue_declare(name, durable=True))
    with pytest.raises(QueueExists, match=r"with other arguments .*x-max-priority") as caught:
        queues.create(name)
    assert "use another name, or delete it there" in str(caught.value)
    assert queues.list(name) == []
    with pytest.raises(QueueNotFound, match="was not created with Penstock"):
        queues.push(name, "x")
    amqp(lambda channel: channel.queue_delete(name))
    with pytest.raises(QueueNotFound, match="create it first"):
        queues.push(name, "x")


def test_a_queue_that_another_client_deleted_is_not_found_and_can_be_created_again(
    queues, name, amqp
):
    queues.create(name)
    amqp(lambda channel: channel.queue_delete(name))
    uses = (queues.stats, queues.pull, queues.purge, lambda name: queues.push(name, "x"))
    for use in uses:
        with pytest.raises(QueueNotFound, match=r"no queue .* any more; create it again"):
            use(name)
    queues.create(name)
    queues.push(name, "x")
    assert queues.pull(name).body == b"x"


def test_a_name_that_rabbitmq_reserves_is_refused(queues):
    with pytest.raises(InvalidField, match=r"begins with amq\."):
        queues.create("amq.orders")


@pytest.mark.parametrize(
    "settings",
    [
        {"fifo": True},
        {"dedup_by_content": True},
        {"max_in_flight": 5},
        {"priority_age": 5},
    ],
    ids=str,
)
def test_a_setting_that_rabbitmq_cannot_have_is_refused_with_the_reason(queues, name, settings):
    with pytest.raises(UnsupportedOperation, match=r"RabbitMQ|AMQP"):
        queues.create(name, **settings)
    assert queues.list(name) == []


def test_a_full_queue_refuses_every_push_and_messages_in_flight_do_not_count(
    queues, name, connect, amqp
):
    queues.create(name, max_messages=2, max_bytes=1_000)
    queues.push_many(name, ["a", "b"])
    with connect() as other:
        with pytest.raises(QueueFull, match=r"messages, bytes: .* takes 2 messages and 1000 bytes"):
            other.push(name, "c")
        claim = queues.pull(name)
        other.push(name, "c")
        queues.release(claim)
        assert queues.stats(name).visible == 3
    assert [queues.pull(name).body for _ in range(3)] == [b"a", b"b", b"c"]


def test_a_quorum_queue_with_a_limit_refuses_soon_after_it_is_full(name, connect):
    """RabbitMQ keeps this limit roughly: see `LACKS`."""
    with connect("?queues=quorum") as queues:
        queues.create(name, max_messages=5)
        refused = 0
        for number in range(100):
            try:
                queues.push(name, b"%d" % number)
            except QueueFull:
                refused += 1
        stored = queues.stats(name).messages
        assert stored == 100 - refused
        assert 5 <= stored <= 20


def test_a_limit_is_fixed_and_a_queue_that_has_one_takes_no_delay(queues, name):
    """A message whose delay ends while the queue is full would be dropped by the broker."""
    queues.create(name, max_messages=1)
    with pytest.raises(UnsupportedOperation, match="RabbitMQ cannot change the limits of a queue"):
        queues.configure(name, max_messages=2)
    with pytest.raises(UnsupportedOperation, match="delay: a queue with a limit cannot have one"):
        queues.push(name, "x", delay=1)
    with pytest.raises(UnsupportedOperation, match="delay: a queue with a limit cannot have one"):
        queues.configure(name, delay=1)
    with pytest.raises(UnsupportedOperation, match="delay: a queue with a limit cannot have one"):
        queues.create(f"{name}-2", delay=1, max_messages=1)
    assert queues.describe(name).settings.max_messages == 1
    assert queues.stats(name).messages == 0


def test_a_dead_letter_queue_has_no_limit(queues, name):
    """A dead letter that does not fit would stay at the head, and be in the way."""
    queues.create(f"{name}-full", max_messages=1)
    with pytest.raises(UnsupportedOperation, match=r"dead_letter: .*-full' has a limit"):
        queues.create(name, dead_letter=f"{name}-full", max_receives=1)
    queues.create(name, dead_letter=f"{name}-dead", max_receives=1)
    queues.remove(f"{name}-dead", force=True)
    with pytest.raises(UnsupportedOperation, match=r"is a dead-letter queue, and has a limit"):
        queues.create(f"{name}-dead", max_messages=1)
    assert queues.list(name) == [name, f"{name}-full"]


def test_a_dead_letter_that_cannot_be_moved_yet_keeps_its_count(queues, name, amqp):
    """The dead-letter queue is gone at the broker for a while."""
    queues.create(name, dead_letter=f"{name}-dead", max_receives=1)
    queues.push(name, "x")
    amqp(lambda channel: channel.queue_delete(f"{name}-dead"))
    claim = queues.pull(name)
    with pytest.raises(QueueNotFound):
        queues.release(claim)
    for _ in range(3):
        with pytest.raises(QueueNotFound):
            queues.pull(name)
    queues.create(f"{name}-dead")
    assert queues.pull(name) is None
    assert queues.pull(f"{name}-dead").body == b"x"


def test_a_dead_letter_that_cannot_be_moved_does_not_keep_the_messages_behind_it(
    queues, name, amqp
):
    queues.create(name, dead_letter=f"{name}-dead", max_receives=1)
    queues.push_many(name, ["poison", "a", "b"])
    amqp(lambda channel: channel.queue_delete(f"{name}-dead"))
    with pytest.raises(QueueNotFound):
        queues.release(queues.pull(name))
    assert [claim.body for claim in queues.pull_many(name, 3)] == [b"a", b"b"]
    queues.create(f"{name}-dead")
    assert queues.pull(name) is None
    assert queues.pull(f"{name}-dead").body == b"poison"


def test_a_redrive_that_fails_keeps_no_message(queues, name, amqp):
    queues.create(name, dead_letter=f"{name}-dead", max_receives=1)
    queues.push_many(name, ["a", "b", "c"])
    for claim in queues.pull_many(name, 3):
        queues.release(claim)
    amqp(lambda channel: channel.queue_delete(name))
    with pytest.raises(QueueNotFound):
        queues.redrive(f"{name}-dead")
    left = queues.pull_many(f"{name}-dead", 9)
    assert sorted(claim.body for claim in left) == [b"a", b"b", b"c"]


def test_what_rabbitmq_cannot_do_is_refused_with_the_reason(queues, name, connect):
    queues.create(name)
    for use in (
        lambda: queues.push(name, "x", group="g"),
        lambda: queues.push(name, "x", dedup_id="d"),
        lambda: queues.peek(name),
        lambda: queues.history("x"),
    ):
        with pytest.raises(UnsupportedOperation, match="RabbitMQ"):
            use()
    with connect("?queues=quorum") as quorum:
        quorum.create(f"{name}-quorum")
        with pytest.raises(UnsupportedOperation, match="quorum queue has no priorities"):
            quorum.push(f"{name}-quorum", "x", priority=1)
        assert quorum.stats(f"{name}-quorum").messages == 0


def test_a_claim_cannot_be_held_for_longer_than_the_broker_permits(name, connect):
    with connect("?hold=60") as queues:
        with pytest.raises(InvalidField, match=r"visibility_timeout: .*consumer_timeout.* 60 s"):
            queues.create(name, visibility_timeout=61)
        queues.create(name, visibility_timeout=60)
        queues.push(name, "x")
        with pytest.raises(InvalidField, match="visibility"):
            queues.pull(name, visibility_timeout=61)
        claim = queues.pull(name)
        with pytest.raises(InvalidField, match="visibility"):
            queues.extend(claim, 61)
        assert queues.delete(claim) is True


def test_a_delay_beyond_what_the_broker_counts_is_refused(queues, name):
    queues.create(name)
    with pytest.raises(InvalidField, match=r"delay: RabbitMQ .* at most 4294967 s"):
        queues.push(name, "x", delay=5_000_000)
    assert queues.stats(name).messages == 0


def test_attributes_that_do_not_fit_into_a_frame_are_refused(queues, name):
    queues.create(name)
    with pytest.raises(penstock.errors.MessageTooLarge, match=r"attributes: .* headers"):
        queues.push(name, "x", attributes={"large": "x" * 70_000})
    queues.push(name, "y" * 1_000_000, attributes={"large": "x" * 48_000})
    claim = queues.pull(name)
    assert (len(claim.body), len(claim.attributes["large"])) == (1_000_000, 48_000)
