"""The life of one message in plain sentences, and as episodes that can be drawn, from its events.

    Pushed to orders at 2026-11-19 14:01:02 by web-1. Delivered 2 times. Worker mail-7 (pid 4121)
    held it for 30.0 s until its claim ran out at 14:02:11; worker mail-3 deleted it at 14:02:40.

It works on the reply to History, of any backend; all times are UTC.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from penstock.service import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, HistoryEvent

# How many claims are told one by one; of more, the first and the last.
CLAIMS_TOLD_MAX: Final = 6
UNKNOWN_HOLDER: Final = "a consumer that gave no name"
# To keep a name with each push would make it slower: see docs/how-to/status.md.
UNKNOWN_PUSHER: Final = "a producer whose name was not kept"
_ENDS: Final = {
    "Deleted": "deleted",
    "Released": "released",
    "ClaimExpired": "ran out",
    "Lost": "lost",
}
_LASTS: Final = {
    "Deleted": "deleted",
    "Expired": "expired",
    "Lost": "lost",
    "Arrived": "moved",
}


class Episode(msgspec.Struct, frozen=True, gc=False):
    """A time in a message's life in which it was in one state.

    `state` is delayed, visible, in flight, moving, or known: in the queue, in an unknown state.
    `until_ms` is None if it goes on. A claim has its epoch, its holder, and `end`: deleted,
    released, ran out, or "" while it lasts. `deadline_ms` is when a claim or a delay ends by
    itself.
    """

    from_ms: int
    until_ms: int | None
    state: str
    queue: str
    epoch: int | None = None
    holder: str | None = None
    deadline_ms: int | None = None
    end: str = ""


class MessageLife(msgspec.Struct, frozen=True, gc=False):
    """What happened to a message: its episodes, where it is now, and sentences about it."""

    state: str
    queue: str
    deliveries: int
    episodes: list[Episode]
    sentences: list[str]


def life(events: Sequence[HistoryEvent], now_ms: int) -> MessageLife:
    """The life that these events tell, oldest first."""
    episodes: list[Episode] = []
    open_episode: Episode | None = None
    state, queue = "", ""
    for event in events:
        began = _after(event, open_episode)
        if began is None:
            continue
        if open_episode is not None:
            end = _ENDS.get(event.kind, "") if open_episode.state == "in flight" else ""
            episodes.append(msgspec.structs.replace(open_episode, until_ms=event.at_ms, end=end))
        open_episode = None
        state, queue = _LASTS.get(event.kind, ""), event.to or event.queue
        if not state:
            open_episode = began
            state = began.state
    if open_episode is not None:
        episodes.append(open_episode)
    claims = [episode for episode in episodes if episode.state == "in flight"]
    return MessageLife(
        state, queue, len(claims), episodes, _sentences(events, claims, episodes, now_ms)
    )


class DeadLetterMove(NamedTuple):
    """How a message became a dead letter: when, how often it was delivered, who held it last."""

    moved_at_ms: int
    deliveries: int
    held_by: str | None
    text: str


def in_words(event: HistoryEvent) -> str:
    """What an event says beside its kind and queue: who, until when, where to."""
    at_ms = event.at_ms
    words = [f"by {event.holder}"] if event.holder else []
    if event.visible_at_ms:
        words.append(f"delayed until {_at(event.visible_at_ms, at_ms)}")
    if event.deadline_ms:
        words.append(f"until {_at(event.deadline_ms, at_ms)}")
    if event.expires_at_ms:
        words.append(f"expires at {_at(event.expires_at_ms, at_ms)}")
    if event.to:
        words.append(f"to {event.to}{', as a dead letter' if event.dead else ''}")
    return ", ".join(words)


def dead_letter_move(
    events: Sequence[HistoryEvent], queue: str, now_ms: int
) -> DeadLetterMove | None:
    """The last move of a message to this queue as a dead letter; None if it is not known."""
    moves = [place for place, event in enumerate(events) if event.dead and event.to == queue]
    if not moves:
        return None
    event = events[moves[-1]]
    episodes = life(events[: moves[-1] + 1], now_ms).episodes
    claims = [each for each in episodes if each.state == "in flight"]
    text = f"moved from {event.queue} at {moment(event.at_ms)}{_after_claims(event, claims)}"
    if claims:
        text += f"; {_claim(claims[-1], event.at_ms, now_ms)}"
    held_by = claims[-1].holder if claims else None
    return DeadLetterMove(event.at_ms, _deliveries(event, claims), held_by, text)


def _after(event: HistoryEvent, before: Episode | None) -> Episode | None:
    """The episode that an event begins; None if it changes no state."""
    at_ms, queue = event.at_ms, event.to or event.queue
    if event.kind == "Carried":
        # The first that is known of a message whose earlier events were dropped.
        return None if before is not None else Episode(at_ms, None, "known", queue)
    if event.kind == "Extended":
        if before is not None and before.state == "in flight":
            return None
        return Episode(at_ms, None, "in flight", queue, event.epoch, deadline_ms=event.deadline_ms)
    if event.kind == "Claimed":
        return Episode(
            at_ms,
            None,
            "in flight",
            queue,
            event.epoch,
            event.holder,
            event.deadline_ms,
        )
    if event.kind in ("Pushed", "Released") and event.visible_at_ms:
        return Episode(at_ms, None, "delayed", queue, deadline_ms=event.visible_at_ms)
    return Episode(at_ms, None, "moving" if event.kind == "Departed" else "visible", queue)


def _sentences(
    events: Sequence[HistoryEvent], claims: list[Episode], episodes: list[Episode], now_ms: int
) -> list[str]:
    if not events:
        return []
    told: list[str] = []
    first = events[0]
    begin_ms = first.at_ms
    if first.kind == "Pushed":
        until = (
            f", delayed until {_at(first.visible_at_ms, begin_ms)}" if first.visible_at_ms else ""
        )
        by = first.holder or UNKNOWN_PUSHER
        told.append(f"Pushed to {first.queue} at {moment(first.at_ms)} by {by}{until}.")
    else:
        told.append(
            f"The journal knows it since {moment(first.at_ms)}; what was before has been dropped."
        )
    if claims or first.kind == "Pushed":
        told.append(_times(len(claims)))
    if claims:
        told.append(_claims(claims, begin_ms, now_ms))
    told += [
        f"{'Dead-lettered' if event.dead else 'Moved'} from {event.queue} to {event.to} at "
        f"{_at(event.at_ms, begin_ms)}{_after_claims(event, claims)}."
        for event in events
        if event.kind in ("Moved", "Departed")
    ]
    told.append(_now(events[-1], episodes, begin_ms, now_ms))
    return [sentence for sentence in told if sentence]


def _times(deliveries: int) -> str:
    if not deliveries:
        return "Never delivered."
    return "Delivered once." if deliveries == 1 else f"Delivered {deliveries} times."


def _claims(claims: list[Episode], begin_ms: int, now_ms: int) -> str:
    shown = [_claim(each, begin_ms, now_ms) for each in claims]
    if len(shown) > CLAIMS_TOLD_MAX:
        left_out = len(shown) - CLAIMS_TOLD_MAX + 1
        half = CLAIMS_TOLD_MAX // 2
        ends = sorted({each.end for each in claims[half : half + left_out]})
        shown[half : half + left_out] = [f"{left_out} more claims {' or '.join(ends)}"]
    text = "; ".join(shown)
    # A holder's own name keeps its first letter.
    is_word = text.startswith(("worker ", "a consumer", "the console", "its content"))
    return f"{text[0].upper() if is_word else text[0]}{text[1:]}."


def _claim(claim: Episode, begin_ms: int, now_ms: int) -> str:
    who = claim.holder or UNKNOWN_HOLDER
    if claim.until_ms is None:
        left_ms = (claim.deadline_ms or now_ms) - now_ms
        until = f", until {_at(claim.deadline_ms, begin_ms)} at most" if left_ms > 0 else ""
        return f"{who} has held it since {_at(claim.from_ms, begin_ms)}{until}"
    held, at = _held(claim.until_ms - claim.from_ms), _at(claim.until_ms, begin_ms)
    if claim.end == "ran out":
        return f"{who} held it for {held} until its claim ran out at {at}"
    if claim.end == "deleted":
        return f"{who} deleted it at {at}, after {held}"
    if claim.end == "lost":
        return f"its content was found damaged at {at}"
    return f"{who} released it at {at}, after {held}"


def _deliveries(event: HistoryEvent, claims: list[Episode]) -> int:
    """How often the queue that a message left had delivered it."""
    return sum(each.from_ms <= event.at_ms and each.queue == event.queue for each in claims)


def _after_claims(event: HistoryEvent, claims: list[Episode]) -> str:
    count = _deliveries(event, claims)
    return f", after {count} deliver{'y' if count == 1 else 'ies'}" if event.dead and count else ""


def _now(last: HistoryEvent, episodes: list[Episode], begin_ms: int, now_ms: int) -> str:
    if last.kind == "Expired":
        at = _at(last.at_ms, begin_ms)
        return f"Expired at {at}: its time to live, or the queue's retention, ended."
    if last.kind == "Arrived":
        return "It arrived in another shard as a new message."
    if last.kind in _LASTS or not episodes:
        return ""
    episode = episodes[-1]
    since = f"since {_at(episode.from_ms, begin_ms)} ({_held(max(0, now_ms - episode.from_ms))})"
    if episode.state == "visible":
        return f"It has waited in {episode.queue} {since}, if it was not purged."
    if episode.state == "delayed":
        until = f", until {_at(episode.deadline_ms, begin_ms)}" if episode.deadline_ms else ""
        return f"It is delayed in {episode.queue} {since}{until}."
    return ""


def _held(ms: int) -> str:
    """A time that something took, for people."""
    if ms < SECOND_MS:
        return f"{ms} ms"
    if ms < 2 * MINUTE_MS:
        return f"{ms / SECOND_MS:.1f} s"
    for unit, size_ms in (("days", DAY_MS), ("h", HOUR_MS)):
        if ms >= 2 * size_ms:
            return f"{ms / size_ms:.1f} {unit}"
    return f"{ms / MINUTE_MS:.0f} min"


def moment(at_ms: int) -> str:
    """A time, for people."""
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}"


def _at(at_ms: int | None, begin_ms: int) -> str:
    """The time of day, with the date if it is another day than that of the beginning."""
    if at_ms is None:
        return "an unknown time"
    is_same_day = at_ms // DAY_MS == begin_ms // DAY_MS
    return moment(at_ms)[11:] if is_same_day else moment(at_ms)
