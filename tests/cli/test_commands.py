"""Every command does what its name says, on a store whose clock the test moves."""

import io
from argparse import Namespace
from base64 import b64encode
from datetime import UTC, datetime

import pytest

import penstock
from penstock.cli import main, status_of
from penstock.cli.parser import COMMANDS, command_named
from penstock.cli.push import batches_of_lines
from penstock.cli.queue_settings import SETTINGS, given_settings, settings_rows
from penstock.cli.session import UsageError
from penstock.errors import BackendLost, CorruptEntry, MessageTooLarge, ProtocolError
from penstock.life import UNKNOWN_HOLDER
from penstock.public import Settings, public_info, public_settings, to_settings
from penstock.service import BODY_BYTES_MAX, QueueInfo, QueueSettings


def test_every_command_named_in_the_help_has_its_module():
    for name in COMMANDS:
        assert callable(command_named(name).run)
        assert callable(command_named(name).add_arguments)


def test_the_table_of_settings_names_each_setting_of_a_queue_once():
    keywords = {setting.name: 1 for setting in SETTINGS}
    assert set(to_settings(keywords)) == set(QueueSettings.__struct_fields__)
    assert keywords.keys() == set(Settings.__struct_fields__)


def test_a_setting_may_be_unset_exactly_if_it_may_be_none(cli):
    for setting in SETTINGS:
        default = public_settings(QueueSettings())[setting.name]
        assert setting.optional == (default is None)


def test_create_takes_every_setting(cli):
    done = cli(
        "create orders --visibility-timeout 1m --delay 1.5 --wait 2s --retention 2d"
        " --max-body-bytes 64KiB --max-messages 10 --max-bytes 1MiB --max-in-flight 5"
        " --dead-letter dead --max-receives 3 --fifo --dedup-by-content --dedup-per-group"
        " --annotation owner=anna --annotation team=eu"
    )
    assert done.results[0]["settings"] == {
        "visibility_timeout": 60,
        "delay": 1.5,
        "wait": 2,
        "retention": 172_800,
        "max_body_bytes": 65_536,
        "max_messages": 10,
        "max_bytes": 1_048_576,
        "max_in_flight": 5,
        "priority_age": None,
        "dead_letter": "dead",
        "max_receives": 3,
        "fifo": True,
        "dedup_by_content": True,
        "dedup_per_group": True,
        "annotations": {"owner": "anna", "team": "eu"},
        "paused": False,
    }


def test_a_priority_age_is_set_shown_and_unset(cli):
    assert cli("create orders --priority-age 5m").results[0]["settings"]["priority_age"] == 300
    shown = public_info(QueueInfo("orders", QueueSettings(priority_age_ms=300_000), 0, 0))
    assert ("priority-age", "5m") in settings_rows(shown)
    unset = cli("configure orders --unset priority-age").results[0]["settings"]
    assert unset["priority_age"] is None


def test_settings_not_given_are_not_sent():
    assert given_settings(Namespace(queue="orders")) == {}


def test_creating_a_queue_again_with_other_settings_is_refused(cli):
    cli("create orders")
    with pytest.raises(penstock.RequestError, match="orders"):
        cli("create orders --max-messages 5")


def test_configure_changes_what_is_named_and_lifts_what_is_unset(cli):
    cli("create orders --max-messages 5 --delay 3s")
    settings = cli("configure orders --delay 4s --unset max-messages").results[0]["settings"]
    assert (settings["delay"], settings["max_messages"]) == (4, None)


def test_configure_without_a_setting_shows_them_all(cli):
    created = cli("create orders --delay 3s").results[0]
    assert cli("configure orders").results[0] == created


def test_only_what_may_be_none_can_be_unset(cli):
    with pytest.raises(UsageError, match="fifo"):
        cli("configure orders --unset fifo")


def test_list_names_queues_in_order_and_by_prefix(cli):
    for name in ["b", "a", "b2"]:
        cli(f"create {name}")
    assert [line["queue"] for line in cli("list").results] == ["a", "b", "b2"]
    assert [line["queue"] for line in cli("list b").results] == ["b", "b2"]


def test_list_names_more_queues_than_one_page_holds(cli):
    for number in range(1_005):
        cli(["create", f"q{number:04}"])
    assert len(cli("list").results) == 1_005


def test_remove_deletes_the_queue(cli):
    cli("create orders")
    assert cli("remove orders").results == [{"queue": "orders", "removed": True}]
    assert cli("list").results == []


def test_a_pushed_message_is_pulled_with_all_its_options(cli, clock):
    cli("create orders")
    pushed = cli(
        "push orders hello --delay 5s --priority 9 --ttl 1h --dedup-id 42 --group eu"
        " --attribute kind=test --attribute note=a=b"
    ).results[0]
    assert cli("pull orders").status == 1
    clock.advance(seconds=5)
    claim = cli("pull orders --visibility-timeout 10s").results[0]
    assert claim["id"] == pushed["id"]
    assert claim["body"] == "hello"
    assert claim["attributes"] == {"kind": "test", "note": "a=b"}
    assert (claim["priority"], claim["group"], claim["dedup_id"]) == (9, "eu", "42")
    assert claim["deadline_ms"] == clock.now_ms() + 10_000


def test_a_duplicate_says_so_and_adds_nothing(cli):
    cli("create orders")
    first = cli("push orders x --dedup-id 1").results[0]
    again = cli("push orders x --dedup-id 1").results[0]
    assert (first["duplicate"], again["duplicate"]) == (False, True)
    assert first["id"] == again["id"]
    assert cli("stats orders").results[0]["messages"] == 1


def test_a_body_is_read_from_a_file_from_stdin_or_from_the_argument(cli, give_stdin, tmp_path):
    path = tmp_path / "body.bin"
    path.write_bytes(b"\x00\xff")
    give_stdin(b"from stdin\n")
    cli("create orders")
    cli(["push", "orders", f"@{path}"])
    cli("push orders -")
    cli("push orders --body @home")
    cli("push orders --body=-dash")
    cli("push orders ''")
    claims = cli("pull orders -n 10").results
    assert claims[0]["body_base64"] == b64encode(b"\x00\xff").decode()
    assert [claim.get("body") for claim in claims[1:]] == ["from stdin\n", "@home", "-dash", ""]


def test_each_line_of_stdin_becomes_a_message(cli, give_stdin):
    cli("create orders")
    give_stdin(b"one\n\ntwo\r\nlast without newline")
    pushed = cli("push orders --lines --group eu").results
    claims = cli("pull orders -n 10").results
    assert [claim["id"] for claim in claims] == [line["id"] for line in pushed]
    bodies = [claim["body"] for claim in claims]
    assert bodies == ["one", "", "two\r", "last without newline"]
    assert {claim["group"] for claim in claims} == {"eu"}


def test_lines_are_pushed_in_batches_and_none_is_lost(cli, give_stdin):
    cli("create orders")
    lines = [f"line {number}" for number in range(25_000)]
    give_stdin("\n".join(lines).encode())
    assert len(cli("push orders --lines").results) == 25_000
    bodies = []
    while claims := cli("pull orders -n 5000").results:
        bodies += [claim["body"] for claim in claims]
    assert bodies == lines


def test_a_refused_line_is_named_and_later_batches_are_not_tried(cli, give_stdin):
    cli("create orders --max-messages 2")
    give_stdin(b"1\n2\n3\n4\n")
    with pytest.raises(penstock.RequestError, match=r"line 3: .*2 of the lines up to 4"):
        cli("push orders --lines")
    assert cli("stats orders").results[0]["messages"] == 2


def test_lines_with_one_dedup_id_are_refused(cli, give_stdin):
    cli("create orders")
    give_stdin(b"1\n2\n")
    with pytest.raises(UsageError, match="dedup-id"):
        cli("push orders --lines --dedup-id 1")


def test_a_line_longer_than_any_body_is_refused_before_memory_is_full():
    endless = io.BytesIO(b"x" * (BODY_BYTES_MAX + 1))
    with pytest.raises(MessageTooLarge, match=str(BODY_BYTES_MAX)):
        list(batches_of_lines(endless))


def test_pull_with_delete_deletes_the_messages(cli):
    cli("create orders")
    cli("push orders a")
    cli("push orders b")
    assert [claim["body"] for claim in cli("pull orders -n 2 --delete").results] == ["a", "b"]
    assert cli("stats orders").results[0]["messages"] == 0


def test_pull_with_delete_deletes_nothing_if_the_output_fails(cli, monkeypatch):
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    cli("create orders")
    cli("push orders precious")
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", Gone())
        with pytest.raises(BrokenPipeError):
            cli("pull orders --delete")
    assert cli("stats orders").results[0]["in_flight"] == 1


def test_a_claim_is_extended_released_and_deleted_by_its_receipt(cli, clock):
    cli("create orders --visibility-timeout 10s")
    cli("push orders x")
    receipt = cli("pull orders").results[0]["receipt"]
    extended = cli(f"extend orders {receipt} 5m").results[0]
    assert extended == {"queue": "orders", "deadline_ms": clock.now_ms() + 300_000}
    assert cli(f"release orders {receipt} --delay 2s").results[0]["released"] is True
    assert cli("pull orders").status == 1
    clock.advance(seconds=2)
    again = cli("pull orders").results[0]
    assert again["receives"] == 2
    deleted = cli(f"delete orders {again['receipt']}")
    assert (deleted.status, deleted.results[0]["deleted"]) == (0, True)
    gone = cli(f"delete orders {again['receipt']}")
    assert (gone.status, gone.results[0]["deleted"]) == (1, False)


def test_a_receipt_is_refused_once_its_claim_has_ended(cli, clock):
    cli("create orders --visibility-timeout 10s")
    cli("push orders x")
    receipt = cli("pull orders").results[0]["receipt"]
    clock.advance(seconds=10)
    for words in (f"delete orders {receipt}", f"extend orders {receipt} 5m"):
        with pytest.raises(penstock.StaleReceipt):
            cli(words)
    assert cli("stats orders").results[0]["visible"] == 1


def test_a_forged_receipt_is_refused(cli):
    cli("create orders")
    with pytest.raises(penstock.errors.InvalidReceipt):
        cli("delete orders 1.1.1.00")


def test_peek_shows_each_state_and_claims_nothing(cli):
    cli("create orders")
    cli("push orders now")
    cli("push orders later --delay 1h")
    assert cli("peek orders").results[0]["body"] == "now"
    assert cli("peek orders --state delayed").results[0]["body"] == "later"
    empty = cli("peek orders --state in-flight")
    assert (empty.status, empty.out) == (1, "")
    cli("pull orders")
    shown = cli("peek orders --state in-flight").results[0]
    assert shown["body"] == "now"
    assert "receipt" not in shown


def test_peek_shows_when_each_delayed_message_becomes_visible(cli, clock):
    cli("create orders")
    cli("push orders later --delay 1h")
    cli("push orders soon --delay 90s")
    cli("push orders now")
    now_ms = clock.now_ms()
    shown = {each["body"]: each for each in cli("peek orders -n 9 --state delayed").results}
    assert shown["later"]["visible_at_ms"] == now_ms + 3_600_000
    assert shown["soon"]["visible_at_ms"] == now_ms + 90_000
    assert "visible_at_ms" not in cli("peek orders").results[0]
    text = cli("peek orders -n 9 --state delayed", json=False).out
    until = datetime.fromtimestamp((now_ms + 90_000) / 1_000, UTC)
    assert f"visible at  {until:%Y-%m-%d %H:%M:%S} UTC, in " in text


def test_peek_of_a_dead_letter_says_why_and_since_when_it_is_there(cli, clock):
    cli("create orders --dead-letter dead --max-receives 2 --visibility-timeout 30s")
    cli("push orders x")
    for _ in range(2):
        cli("pull orders")
        clock.advance(seconds=30)
    moved_ms = clock.now_ms()
    clock.advance(seconds=60)
    shown = cli("peek dead").results[0]
    assert (shown["source"], shown["deliveries"], shown["moved_at_ms"]) == ("orders", 2, moved_ms)
    holder = shown["held_by"]
    at = datetime.fromtimestamp(moved_ms / 1_000, UTC)
    text = cli("peek dead", json=False).out
    assert f"dead letter: moved from orders at {at:%Y-%m-%d %H:%M:%S}, after 2 deliveries; " in text
    assert f"{holder or UNKNOWN_HOLDER} held it for 30.0 s until its claim ran out at " in text


def test_peek_in_a_store_without_histories_shows_what_is_known(shell):
    done = shell("create orders\npush orders x --delay 1h\npeek orders --state delayed", "memory:")
    assert done.status == 0
    assert done.err == ""
    assert "body      x" in done.out
    assert "visible at" not in done.out


def test_purge_counts_what_it_removed(cli):
    cli("create orders")
    cli("push orders a")
    cli("push orders b")
    assert cli("purge orders").results == [{"queue": "orders", "purged": 2}]


def test_redrive_moves_dead_letters_back(cli, clock):
    cli("create orders --dead-letter dead --max-receives 1 --visibility-timeout 1s")
    for body in "abc":
        cli(f"push orders {body}")
    cli("pull orders -n 3")
    clock.advance(seconds=1)
    assert cli("stats dead").results[0]["visible"] == 3
    assert cli("redrive dead --limit 1").results == [{"queue": "dead", "moved": 1}]
    assert cli("redrive dead").results == [{"queue": "dead", "moved": 2}]
    assert cli("stats orders").results[0]["visible"] == 3


def test_history_lists_all_events_of_a_message_in_order(cli):
    cli("create orders")
    message_id = cli("push orders x").results[0]["id"]
    receipt = cli("pull orders").results[0]["receipt"]
    cli(f"delete orders {receipt}")
    events = cli(f"history {message_id}").results
    assert len(events) == 3
    assert {event["queue"] for event in events} == {"orders"}
    assert [event["epoch"] for event in events][1] == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 2),
        (penstock.QueueNotFound("x"), 3),
        (BackendLost("x"), 4),
        (ProtocolError("x"), 5),
        (CorruptEntry("x"), 6),
    ],
)
def test_each_class_of_error_has_its_exit_status(error, status):
    assert status_of(error) == status


def test_main_reads_its_arguments_from_the_process(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["penstock", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("penstock ")


def test_an_error_of_many_lines_is_printed_in_one(run_main):
    done = run_main("push", "--url", "memory:", "a\nb", "x")
    assert done.status == 3
    assert done.err.count("\n") == 1


def test_an_option_may_not_be_shortened(run_main):
    done = run_main("--url", "memory:", "create", "q", "--dead", "x")
    assert done.status == 2
    assert "--dead" in done.err


def test_create_says_which_dead_letter_queue_it_made(cli):
    words = "create orders --dead-letter orders-daed --max-receives 3"
    assert cli(words).results[0]["also_created"] == ["orders-daed"]
    assert cli(words).results[0]["also_created"] == []
    done = cli("create other --dead-letter other-dead --max-receives 3", json=False)
    assert "also created        other-dead, the dead-letter queue" in done.out
    done = cli("configure other --dead-letter third --max-receives 3", json=False)
    assert "also created        third, the dead-letter queue" in done.out


def test_a_dead_letter_queue_in_use_is_removed_by_force_only(cli):
    cli("create orders --dead-letter dead --max-receives 3")
    with pytest.raises(
        penstock.errors.QueueInUse, match="'dead' is the dead-letter queue of 'orders'"
    ):
        cli("remove dead")
    assert cli("remove dead --force").results == [{"queue": "dead", "removed": True}]


def test_create_of_a_fifo_name_makes_a_fifo_queue(cli):
    assert cli("create x.fifo").results[0]["settings"]["fifo"] is True
    with pytest.raises(penstock.errors.InvalidField, match="for FIFO queues only"):
        cli("create y.fifo --no-fifo")


def test_redrive_of_a_queue_that_is_no_dead_letter_queue_is_refused(cli):
    cli("create orders")
    with pytest.raises(penstock.errors.InvalidField, match="dead-letter queue of no queue"):
        cli("redrive orders")


def test_an_error_names_the_setting_that_was_typed(cli):
    with pytest.raises(penstock.errors.InvalidField, match=r"^max_messages: 0 is outside 1 to"):
        cli("create orders --max-messages 0")
