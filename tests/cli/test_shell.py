"""The shell runs whole flows in one process, and its output is readable."""

import re

FLOW = """
create orders --dead-letter orders-dead --max-receives 5
push orders 'two words' --group eu --priority 3 --attribute kind=test
pull orders
"""


def test_a_claim_is_shown_with_a_label_a_line(shell):
    done = shell(FLOW)
    assert done.status == 0
    shown = done.out.splitlines()[-9:]
    labels = [
        "id",
        "age",
        "receives",
        "receipt",
        "ends_in",
        "priority",
        "group",
        "attribute",
        "body",
    ]
    assert [line.split("  ")[0].replace(" ", "_") for line in shown] == labels
    assert re.fullmatch(r"body +two words", shown[-1])


def test_settings_are_shown_as_they_are_typed(shell):
    shown = dict(
        line.split(None, 1) for line in shell("create q --delay 90s --fifo").out.split("\n")[:-1]
    )
    assert (shown["queue"], shown["delay"], shown["fifo"]) == ("q", "90s", "yes")
    assert (shown["retention"], shown["max-messages"], shown["annotations"]) == (
        "4d",
        "none",
        "none",
    )


def test_stats_are_printed_in_aligned_columns(shell):
    done = shell("create a\ncreate a-longer-name\npush a x\nstats")
    head, first, second = done.out.splitlines()[-3:]
    assert head.split() == [
        "queue",
        "visible",
        "delayed",
        "in",
        "flight",
        "size",
        "oldest",
        "waiting",
    ]
    assert head.index("visible") + len("visible") == first.index("1") + 1 == second.index("0") + 1


def test_history_is_printed_in_aligned_columns(cli):
    cli("create orders")
    message_id = cli("push orders x").results[0]["id"]
    cli("pull orders --visibility-timeout 1h")
    *told, _, head, first, second = cli(f"history {message_id}", json=False).out.splitlines()
    assert told == cli(f"why {message_id}", json=False).out.splitlines()
    assert told[1] == "Delivered once."
    events = [first, second]
    assert [event[head.index("queue") :].split()[0] for event in events] == ["orders", "orders"]
    assert events[1].startswith("2023-11-14 22:13:20.000")
    assert events[1].endswith("until 23:13:20")


def test_short_results_are_printed_as_words(cli):
    cli("create orders")
    cli("push orders x --dedup-id 1")
    assert cli("push orders x --dedup-id 1", json=False).out.endswith(" (duplicate)\n")
    receipt = cli("pull orders").results[0]["receipt"]
    assert cli(f"extend orders {receipt} 5m", json=False).out == "held for 5m\n"
    assert cli(f"delete orders {receipt}", json=False).out == "deleted\n"
    assert cli(f"delete orders {receipt}", json=False).out == "gone already\n"
    assert cli("purge orders", json=False).out == "purged 0\n"
    assert cli("remove orders", json=False).out == "removed orders\n"


def test_control_characters_in_a_body_do_not_reach_the_terminal(shell):
    done = shell("create q\npush q '\x1b[2Jboo'\npull q")
    assert "\x1b" not in done.out
    assert "\\x1b[2Jboo" in done.out


def test_the_lines_of_a_body_are_aligned(cli):
    cli("create orders")
    cli(["push", "orders", "first\nsecond"])
    first, second = cli("peek orders", json=False).out.splitlines()[-2:]
    assert first.index("first") == second.index("second")


def test_messages_are_shown_with_an_empty_line_between(cli):
    cli("create orders")
    cli("push orders a")
    cli("push orders b")
    assert cli("peek orders -n 2", json=False).out.count("\n\n") == 1


def test_a_script_stops_at_its_first_error_and_names_the_line(shell):
    done = shell("create q\n\npush nowhere x\ncreate never\n")
    assert done.status == 3
    assert done.err == "penstock: line 3: queue: there is no queue 'nowhere'; create it first\n"
    assert "never" not in done.out


def test_finding_nothing_does_not_stop_a_script(shell):
    done = shell("create q\npull q\nlist\n")
    assert (done.status, done.out.splitlines()[-1]) == (0, "q")


def test_the_last_status_is_that_of_the_shell(shell):
    assert shell("create q\npull q\n").status == 1


def test_usage_errors_name_the_line_too(shell):
    for bad in ["push", "push q 'open", "frobnicate", "pull q -n x", "shell", "push q -"]:
        done = shell(f"create q\n{bad}\n")
        assert done.status == 2, bad
        assert done.err.startswith("penstock: line 2: "), bad
        assert done.err.count("\n") == 1, bad


def test_help_and_exit_are_understood(shell):
    done = shell("help\nexit\nfrobnicate\n")
    assert done.status == 0
    assert "exit status:" in done.out


def test_help_of_one_command_does_not_end_the_shell(shell):
    done = shell("push --help\ncreate q\n")
    assert done.status == 0
    assert "--attribute" in done.out
    assert "visibility-timeout" in done.out


def test_one_shell_may_reach_two_stores(shell):
    done = shell("create here\nlist --url memory:?history=1\n", url="memory:")
    assert done.status == 0
    assert done.out.splitlines()[-1] != "here"


def test_json_asked_of_the_shell_is_asked_of_every_command(run_main):
    done = run_main("shell", "--json", "--url", "memory:", stdin=b"create q\npush q x\nstats\n")
    assert [result["queue"] for result in done.results] == ["q", "q", "q"]
