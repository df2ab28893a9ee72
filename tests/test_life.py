"""The life of a message in sentences, from the events of a real engine."""

import penstock
from penstock.clock import ManualClock
from penstock.life import CLAIMS_TOLD_MAX, UNKNOWN_PUSHER, in_words, life
from penstock.service import HistoryEvent

# 2026-11-19 14:01:02 UTC.
START_MS = 1_795_096_862_000


def pulled(queues, queue="mail", **options):
    claim = queues.pull(queue, **options)
    assert claim is not None
    return claim


def told(queues, clock, message_id):
    return " ".join(life(queues.history(message_id), clock.now_ms()).sentences)


def test_who_held_a_message_and_how_it_ended_is_said():
    clock = ManualClock(START_MS)
    with penstock.connect("memory:?history=100", clock=clock) as queues:
        queues.create("mail")
        message_id = queues.push("mail", b"x").id
        clock.advance(seconds=39)
        queues.pull("mail", holder="worker mail-7 (pid 4121)", visibility_timeout=30)
        clock.advance(seconds=30)
        clock.advance(seconds=24)
        claim = pulled(queues, holder="worker mail-3")
        clock.advance(seconds=5)
        queues.delete(claim)
        assert told(queues, clock, message_id) == (
            "Pushed to mail at 2026-11-19 14:01:02 by a producer whose name was not kept. "
            "Delivered 2 times. "
            "Worker mail-7 (pid 4121) held it for 30.0 s until its claim ran out at 14:02:11; "
            "worker mail-3 deleted it at 14:02:40, after 5.0 s."
        )


def test_a_dead_letter_is_told_with_the_queue_it_waits_in():
    clock = ManualClock(START_MS)
    with penstock.connect("memory:?history=100", clock=clock) as queues:
        queues.create("mail", dead_letter="dead", max_receives=1)
        message_id = queues.push("mail", b"x", delay=10).id
        clock.advance(seconds=10)
        queues.release(pulled(queues))
        clock.advance(seconds=86_400)
        found = life(queues.history(message_id), clock.now_ms())
        assert (found.state, found.queue, found.deliveries) == ("visible", "dead", 1)
        assert [each.state for each in found.episodes][:3] == ["delayed", "visible", "in flight"]
        assert found.sentences == [
            f"Pushed to mail at 2026-11-19 14:01:02 by {UNKNOWN_PUSHER}, delayed until 14:01:12.",
            "Delivered once.",
            "A consumer that gave no name released it at 14:01:12, after 0 ms.",
            "Dead-lettered from mail to dead at 14:01:12, after 1 delivery.",
            "It has waited in dead since 14:01:12 (24.0 h), if it was not purged.",
        ]


def test_a_claim_that_lasts_is_told_with_its_deadline():
    clock = ManualClock(START_MS)
    with penstock.connect("memory:?history=100", clock=clock) as queues:
        queues.create("mail")
        message_id = queues.push("mail", b"x").id
        queues.pull("mail", holder="worker mail-3", visibility_timeout=60)
        assert told(queues, clock, message_id).endswith(
            "Worker mail-3 has held it since 14:01:02, until 14:02:02 at most."
        )


def test_of_many_claims_the_first_and_the_last_are_told():
    events = [HistoryEvent(0, "Pushed", "q")]
    for number in range(1, 101):
        events.append(HistoryEvent(number * 10, "Claimed", "q", number, holder=f"w{number}"))
        events.append(HistoryEvent(number * 10 + 5, "ClaimExpired", "q", number))
    found = life(events, 2_000)
    (claims,) = [text for text in found.sentences if "w1 held" in text]
    assert len(claims.split("; ")) == CLAIMS_TOLD_MAX
    assert "95 more claims ran out" in claims
    assert "w100 held it" in claims


def test_a_message_whose_first_events_were_dropped_is_not_called_undelivered():
    found = life([HistoryEvent(1_000, "Carried", "q")], 2_000)
    assert found.sentences == [
        "The journal knows it since 1970-01-01 00:00:01; what was before has been dropped."
    ]
    assert (found.state, found.queue) == ("known", "q")
    assert life([], 0).sentences == []


def test_an_event_is_told_in_words():
    at_ms = 1_795_112_221_138
    claimed = HistoryEvent(at_ms, "Claimed", "mail", 1, holder="mail-7", deadline_ms=at_ms + 4_000)
    assert in_words(claimed) == "by mail-7, until 18:17:05"
    moved = HistoryEvent(at_ms, "Moved", "mail", to="mail-dead", dead=True)
    assert in_words(moved) == "to mail-dead, as a dead letter"
    pushed = HistoryEvent(at_ms, "Pushed", "mail", visible_at_ms=at_ms + 86_400_000)
    assert in_words(pushed) == "delayed until 2026-11-20 18:17:01"
    assert in_words(HistoryEvent(at_ms, "Deleted", "mail", 1)) == ""
