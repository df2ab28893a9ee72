"""What must hold of every message's life, as named checks in SQL over the events.

The journal gives each event its place at the moment it took effect, so the checks trust that order
and nothing else.

Most messages lead a plain life: pushed, claimed once, deleted, all in one queue and one term. One
aggregate a message tells these from the rest, by the places of the three events and by there being
no other; in whatever order events are met, the answer is the same. A plain life can break none of
the checks made of a message, and a row of it says all that the other checks ask. Of the rest one
window pass finds what the state was before each event; an event breaks at most one check there.
Groups, dedup ids, the balance of each queue, terms and gaps are looked at by themselves.

Rows that travel are narrow: a store and shard are one number, their hash (`home`), until a finding
is shown; with a queue they are another (`line`). What is said of queues is little and is joined as
rows by it: a stretch is a queue's time between two such words. The SQL keeps to what other engines
understand too; `Runner` is all that it needs of one.

A journal whose beginning was dropped tells of messages that were pushed before: what is not known
of them is not held against them. Where entries are missing in the middle, other findings may follow
from that alone.
"""

from typing import Final, Protocol, TypeVar

from penstock.service import DEDUP_WINDOW_MS
from penstock.spark.blocks import INDEX_BITS

# What an audit reads: no bodies.
SCHEMA: Final = (
    "store string, shard int, term bigint, entry bigint, index int, sequence bigint, "
    "offset bigint, kind string, at_ms bigint, queue bigint, message bigint, epoch bigint, "
    "deadline_ms bigint, visible_at_ms bigint, expires_at_ms bigint, group string, "
    "dedup_id string, holder string, name string, to_queue bigint, rank bigint, dead boolean, "
    "count bigint, extra string, damage string"
)
CHECKS: Final = {
    "pushed first": "a message is pushed before anything else befalls it",
    "pushed once": "a message's number is never used again",
    "nothing after the end": "a message that was deleted, expired or purged stays gone",
    "one holder": "at most one claim of a message lives at any instant",
    "claim of the visible": "only a visible message is claimed",
    "epochs rise": "each claim of a message has the next epoch",
    "current claim only": "delete, extend and release need the current claim's epoch; an "
    "extension may take up the last one again after it ran out",
    "expiry of the current claim": "only the current claim runs out",
    "expiry after the deadline": "a claim runs out no earlier than its deadline",
    "delay in full": "a delayed message becomes visible no earlier than it was to",
    "expired when due": "a message expires after its TTL, and never while it is claimed",
    "move of the visible": "only a visible message moves to another queue",
    "dead letter after N": "a message is dead-lettered after exactly max_receives claims",
    "one message per dedup id": "a dedup id makes one message within its window",
    "order in the group": "a FIFO queue gives the messages of a group in their order",
    "nothing lost": "what came into a queue left it, or is in it",
    "terms rise": "no entry comes from an owner of the shard that was replaced",
    "no gaps": "every entry is there and whole",
}

# Everything that is not said of a message: few rows, and what the other checks lean on.
_SAID: Final = """
    SELECT store, shard, xxhash64(store, shard) AS home, term, entry, sequence, kind, queue, name,
      count, extra IS NOT NULL AS settled,
      CAST(get_json_object(extra, '$.settings.max_receives') AS bigint) AS max_receives,
      get_json_object(extra, '$.settings.dead_letter') AS dead_letter,
      CAST(get_json_object(extra, '$.settings.fifo') AS boolean) AS fifo,
      CAST(get_json_object(extra, '$.settings.dedup_per_group') AS boolean) AS dedup_per_group
    FROM {events} WHERE message IS NULL
"""

_MARKS: Final = "SELECT * FROM {said} WHERE kind <> 'Damaged'"

_QUEUES: Final = """
    WITH told AS (
      SELECT store, shard, home, queue, max(name) AS name, bool_or(fifo) AS fifo,
        bool_or(dedup_per_group) AS dedup_per_group, max(dead_letter) AS dead_letter,
        max(CASE WHEN kind = 'QueueRemoved' THEN 1 ELSE 0 END) AS removed,
        count(DISTINCT CASE WHEN settled THEN concat(coalesce(CAST(max_receives AS string), ''),
          '/', coalesce(dead_letter, '')) END) = 1 AS never_changed
      FROM {marks} GROUP BY store, shard, home, queue
    ), lasting AS (
      SELECT home, name FROM told GROUP BY home, name HAVING count(*) = 1 AND max(removed) = 0
    )
    SELECT told.*, xxhash64(told.home, queue) AS line,
      never_changed AND lasting.name IS NOT NULL AS strict
    FROM told LEFT JOIN lasting ON lasting.home = told.home AND lasting.name = told.dead_letter
"""

# A queue's time from one word about it to the next: when it was last emptied, and its limit.
_STRETCHES: Final = """
    WITH cut AS (
      SELECT home, queue, sequence AS from_sequence,
        coalesce(lead(sequence) OVER line, 9223372036854775807) AS to_sequence,
        max(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN sequence END)
          OVER line AS emptied,
        count(CASE WHEN kind IN ('QueuePurged', 'QueueRemoved') THEN 1 END) OVER line AS nth,
        max(CASE WHEN settled THEN sequence END) OVER line AS settled_at
      FROM {marks} WINDOW line AS (PARTITION BY home, queue ORDER BY sequence)
    )
    SELECT line, from_sequence, to_sequence, emptied, nth, settings.max_receives, strict,
      queues.fifo, queues.dedup_per_group
    FROM cut
    JOIN {queues} AS queues ON queues.home = cut.home AND queues.queue = cut.queue
    LEFT JOIN {marks} AS settings ON settings.home = cut.home AND settings.queue = cut.queue
      AND settings.sequence = settled_at
"""

# The times between two emptyings of a queue.
_EMPTIED: Final = """
    WITH ends AS (
      SELECT line, 0 AS sequence FROM {queues}
      UNION ALL
      SELECT xxhash64(home, queue), sequence FROM {marks}
      WHERE kind IN ('QueuePurged', 'QueueRemoved')
    )
    SELECT line, sequence AS from_sequence, coalesce(lead(sequence) OVER (
      PARTITION BY line ORDER BY sequence), 9223372036854775807) AS to_sequence
    FROM ends
"""

# A row a message: where its events are, if its life is plain.
_FOLDED: Final = """
    SELECT xxhash64(store, shard) AS home, message, count(*) AS events,
      max(CASE WHEN kind = 'Pushed' AND visible_at_ms IS NULL THEN sequence END) AS pushed,
      max(CASE WHEN kind = 'Claimed' AND epoch = 1 THEN sequence END) AS claimed,
      max(CASE WHEN kind = 'Deleted' AND epoch = 1 THEN sequence END) AS deleted,
      max(CASE WHEN kind = 'Pushed' THEN at_ms END) AS pushed_ms,
      max(CASE WHEN `group` IS NOT NULL THEN xxhash64(`group`, 0) END) AS of_group,
      max(CASE WHEN dedup_id IS NOT NULL THEN xxhash64(dedup_id, 0) END) AS of_dedup,
      max(queue) AS queue, min(queue) AS least_queue, max(term) AS term, min(term) AS least_term
    FROM {events} WHERE message IS NOT NULL
    GROUP BY message, xxhash64(store, shard)
"""

# Each of the three events is there at most once, and nothing else is: a count says so.
_MESSAGES: Final = """
    SELECT home, message, queue, term, pushed, claimed, deleted, pushed_ms, of_group, of_dedup,
      coalesce(nth, 0) AS nth, fifo, dedup_per_group,
      coalesce(events = 1 + CASE WHEN claimed IS NULL THEN 0 ELSE 1 END
          + CASE WHEN deleted IS NULL THEN 0 ELSE 1 END
        AND (claimed IS NULL OR claimed > pushed) AND (deleted IS NULL OR deleted > claimed)
        AND queue = least_queue AND term = least_term
        AND pushed > coalesce(emptied, 0) AND coalesce(max_receives, 1) > 0, false) AS plain
    FROM {folded} AS folded LEFT JOIN {stretches} AS stretches
      ON line = xxhash64(home, queue) AND coalesce(deleted, claimed, pushed) >= from_sequence
      AND coalesce(deleted, claimed, pushed) < to_sequence
"""

_ODD: Final = "SELECT home AS odd_home, message AS odd_message FROM {messages} WHERE NOT plain"

# Every event of the messages whose lives are not plain.
_REST: Final = """
    SELECT odd_home AS home, message, sequence, kind, at_ms, queue, term, epoch, dead,
      coalesce(deadline_ms, visible_at_ms) AS until_ms, expires_at_ms, to_queue, rank,
      CASE WHEN `group` IS NOT NULL THEN xxhash64(`group`, 0) END AS of_group,
      CASE WHEN dedup_id IS NOT NULL THEN xxhash64(dedup_id, 0) END AS of_dedup
    FROM {events} JOIN {odd} AS odd
      ON odd_message = message AND odd_home = xxhash64(store, shard)
"""

# One pass that counts everything: a row a queue and time between two emptyings.
_TALLY: Final = f"""
    WITH moves AS (
      SELECT home, queue, sequence, kind, term, CASE WHEN kind = 'Pushed' THEN 1
          WHEN kind IN ('Deleted', 'Expired', 'Lost', 'Moved') THEN -1 ELSE 0 END AS held,
        1 AS events, sequence >> {INDEX_BITS} AS entry
      FROM {{rest}}
      UNION ALL
      SELECT home, to_queue, sequence, kind, term, 1, 0, sequence >> {INDEX_BITS}
      FROM {{rest}} WHERE kind = 'Moved'
      UNION ALL
      SELECT home, queue, sequence, kind, term, 0, 1, entry FROM {{said}}
    ), counted AS (
      SELECT home, moves.queue AS queue, coalesce(nth, 0) AS nth, events, held,
        CASE WHEN entry > 0 THEN entry END AS first_entry, entry AS last_entry,
        CASE WHEN events = 1 AND kind <> 'Damaged' AND sequence % {1 << INDEX_BITS} = 0
          THEN 1 ELSE 0 END AS entries,
        CASE WHEN kind <> 'Damaged' THEN term END AS first_term, term AS last_term
      FROM moves LEFT JOIN {{stretches}} AS stretches ON line = xxhash64(home, moves.queue)
        AND sequence >= from_sequence AND sequence < to_sequence
      UNION ALL
      SELECT home, queue, nth,
        1 + CASE WHEN claimed IS NULL THEN 0 ELSE 1 END
          + CASE WHEN deleted IS NULL THEN 0 ELSE 1 END,
        CASE WHEN deleted IS NULL THEN 1 ELSE 0 END, pushed >> {INDEX_BITS},
        coalesce(deleted, claimed, pushed) >> {INDEX_BITS},
        CASE WHEN pushed % {1 << INDEX_BITS} = 0 THEN 1 ELSE 0 END
          + CASE WHEN claimed % {1 << INDEX_BITS} = 0 THEN 1 ELSE 0 END
          + CASE WHEN deleted % {1 << INDEX_BITS} = 0 THEN 1 ELSE 0 END, term, term
      FROM {{messages}} WHERE plain
    )
    SELECT home, queue, nth, sum(events) AS events, sum(held) AS held,
      min(first_entry) AS first_entry, max(last_entry) AS last_entry, sum(entries) AS entries,
      min(first_term) AS first_term, max(last_term) AS last_term
    FROM counted GROUP BY home, queue, nth
"""

_HOMES: Final = "SELECT DISTINCT store, shard, xxhash64(store, shard) AS home FROM {events}"

_UNNAMED: Final = """
    SELECT tally.home FROM {tally} AS tally LEFT JOIN {homes} AS homes ON homes.home = tally.home
    WHERE store IS NULL
"""

_STORES: Final = """
    SELECT store, min(shard) AS shard, min(first_entry) AS first_entry,
      max(last_entry) AS last_entry, sum(entries) AS entries, sum(events) AS events,
      1 + max(last_term) - min(first_term) AS terms
    FROM {tally} AS tally JOIN {homes} AS homes ON homes.home = tally.home GROUP BY store
"""

# What each message's state was before each of its events.
_LIVES: Final = """
    WITH seen AS (
      SELECT home, message, sequence, kind, at_ms, queue, epoch, dead,
        last_value(CASE WHEN kind IN ('Pushed', 'Released')
            THEN if(until_ms IS NULL, 'visible', 'delayed')
          WHEN kind IN ('DelayEnded', 'ClaimExpired', 'Moved') THEN 'visible'
          WHEN kind IN ('Claimed', 'Extended') THEN 'in flight'
          WHEN kind IN ('Deleted', 'Expired', 'Lost') THEN 'gone' END)
          IGNORE NULLS OVER earlier AS state,
        last_value(CASE WHEN kind = 'Claimed' THEN epoch END) IGNORE NULLS OVER earlier
          AS current_epoch,
        last_value(CASE WHEN kind IN ('Pushed', 'Claimed', 'Extended', 'Released')
          THEN coalesce(until_ms, 0) END) IGNORE NULLS OVER earlier AS due_ms,
        last_value(CASE WHEN kind = 'Pushed' THEN coalesce(expires_at_ms, 0)
          WHEN kind = 'Moved' THEN 0 END) IGNORE NULLS OVER earlier AS expires_ms,
        last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END)
          IGNORE NULLS OVER earlier AS entered
      FROM {rest} WHERE kind <> 'Carried'
      WINDOW earlier AS (PARTITION BY message, home ORDER BY sequence
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
    )
    SELECT *, coalesce(current_epoch, 0) - coalesce(
      last_value(CASE WHEN kind = 'Moved' THEN coalesce(current_epoch, 0) END)
        IGNORE NULLS OVER earlier, 0) AS receives
    FROM seen
    WINDOW earlier AS (PARTITION BY message, home ORDER BY sequence
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
"""

_BY_MESSAGE: Final = f"""
    WITH lives AS ({_LIVES}), judged AS (
      SELECT lives.*, max_receives, CASE
        WHEN kind <> 'Pushed' AND state IS NULL THEN 'pushed first'
        WHEN kind = 'Pushed' AND state IS NOT NULL THEN 'pushed once'
        WHEN state = 'gone' OR emptied > entered THEN 'nothing after the end'
        WHEN kind = 'Claimed' AND state = 'in flight' THEN 'one holder'
        WHEN kind = 'Claimed' AND state = 'delayed' THEN 'claim of the visible'
        WHEN kind = 'Claimed' AND entered IS NOT NULL
          AND epoch <> coalesce(current_epoch, 0) + 1 THEN 'epochs rise'
        WHEN kind = 'Claimed' AND entered IS NOT NULL AND strict
          AND receives >= max_receives THEN 'dead letter after N'
        WHEN kind IN ('Deleted', 'Released', 'Lost')
          AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'current claim only'
        -- A latecomer may take its last claim up again while nobody else has the message.
        WHEN kind = 'Extended'
          AND (state = 'delayed' OR epoch <> current_epoch) THEN 'current claim only'
        WHEN kind = 'ClaimExpired'
          AND (state <> 'in flight' OR epoch <> current_epoch) THEN 'expiry of the current claim'
        WHEN kind = 'ClaimExpired' AND at_ms < due_ms THEN 'expiry after the deadline'
        WHEN kind = 'DelayEnded'
          AND (state <> 'delayed' OR at_ms < due_ms) THEN 'delay in full'
        WHEN kind = 'Expired' AND (state = 'in flight' OR at_ms < expires_ms)
          THEN 'expired when due'
        WHEN kind = 'Moved' AND state <> 'visible' THEN 'move of the visible'
        WHEN kind = 'Moved' AND dead AND entered IS NOT NULL
          AND (max_receives IS NULL OR receives < max_receives
            OR (strict AND receives > max_receives)) THEN 'dead letter after N'
        END AS `check`
      FROM lives LEFT JOIN {{stretches}} AS stretches
        ON line = xxhash64(home, queue) AND sequence >= from_sequence AND sequence < to_sequence
    )
    SELECT `check`, home, message, queue, sequence, at_ms,
      concat(kind, coalesce(' by claim ' || CAST(epoch AS string), ''), ' of a message that ',
        CASE WHEN state IS NULL THEN 'was never pushed'
          WHEN `check` = 'nothing after the end' THEN 'was gone'
          ELSE concat('was ', state,
            coalesce(', claim ' || CAST(current_epoch AS string), '')) END,
        CASE `check` WHEN 'expiry after the deadline'
            THEN concat(', ', CAST(due_ms - at_ms AS string), ' ms before its deadline')
          WHEN 'dead letter after N' THEN concat(', pulled ', CAST(receives AS string),
            ' times here where ', coalesce(CAST(max_receives AS string), 'no number'),
            ' is the limit')
          ELSE '' END) AS detail
    FROM judged WHERE `check` IS NOT NULL
"""

_DEDUP: Final = f"""
    WITH named AS (
      SELECT home, message, queue, sequence, at_ms, of_dedup, rest.of_group, fifo,
        dedup_per_group, nth
      FROM {{rest}} AS rest LEFT JOIN {{stretches}} AS stretches
        ON line = xxhash64(home, queue) AND sequence >= from_sequence AND sequence < to_sequence
      WHERE kind = 'Pushed' AND of_dedup IS NOT NULL
      UNION ALL
      SELECT home, message, queue, pushed, pushed_ms, of_dedup, of_group, fifo, dedup_per_group, nth
      FROM {{messages}} WHERE plain AND of_dedup IS NOT NULL
    ), beside AS (
      -- A FIFO queue that was purged has forgotten what it was given before.
      SELECT named.*, lag(at_ms) OVER same AS earlier_ms, lag(message) OVER same AS first
      FROM named
      WINDOW same AS (PARTITION BY of_dedup, queue, home, CASE WHEN fifo THEN nth ELSE 0 END,
        CASE WHEN dedup_per_group THEN of_group END ORDER BY sequence)
    )
    SELECT 'one message per dedup id' AS `check`, home, message, queue, sequence, at_ms,
      concat('its dedup id made message ', CAST(first AS string), ' ',
        CAST(at_ms - earlier_ms AS string), ' ms before') AS detail
    FROM beside WHERE at_ms < earlier_ms + {DEDUP_WINDOW_MS}
"""

# Of FIFO queues alone: where in the order each message stood, and since when.
_LINES: Final = """
    SELECT rest.home AS home, message, sequence, kind, rest.queue AS queue, at_ms, to_queue, rank,
      of_group,
      last_value(CASE WHEN kind = 'Pushed' THEN message WHEN kind = 'Moved' THEN rank END)
        IGNORE NULLS OVER earlier AS place,
      last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END)
        IGNORE NULLS OVER earlier AS entered,
      last_value(of_group) IGNORE NULLS OVER earlier AS group_before
    FROM {rest} AS rest JOIN {queues} AS queues ON line = xxhash64(rest.home, rest.queue)
    WHERE fifo AND kind <> 'Carried'
    WINDOW earlier AS (PARTITION BY message, rest.home ORDER BY sequence
      ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
"""

# A stay is a message's time in a queue. A claim may begin when everyone with an earlier place has
# left, or in one pull with them.
_GROUPS: Final = f"""
    WITH moments AS (
      SELECT home, message, sequence AS entered, coalesce(to_queue, queue) AS queue,
        coalesce(rank, message) AS place, coalesce(of_group, group_before) AS of_group,
        sequence AS last_sequence, CAST(NULL AS bigint) AS left_at
      FROM {{lines}} WHERE kind IN ('Pushed', 'Moved')
      UNION ALL
      SELECT home, message, entered, NULL, NULL, NULL, sequence,
        CASE WHEN kind IN ('Deleted', 'Expired', 'Lost', 'Moved') THEN sequence END
      FROM {{lines}} WHERE entered IS NOT NULL
    ), stays AS (
      SELECT home, max(queue) AS queue, max(of_group) AS of_group, max(place) AS place,
        max(last_sequence) AS last_sequence, min(left_at) AS left_at
      FROM moments GROUP BY message, entered, home
      UNION ALL
      SELECT home, queue, of_group, message, coalesce(deleted, claimed, pushed), deleted
      FROM {{messages}} WHERE plain AND fifo
    ), steps AS (
      SELECT stays.home AS home, queue, of_group, place, 1 AS after,
        CAST(NULL AS bigint) AS message, CAST(NULL AS bigint) AS sequence,
        CAST(NULL AS bigint) AS at_ms,
        coalesce(left_at, to_sequence, 9223372036854775807) AS left_at
      FROM stays LEFT JOIN {{emptied}} AS emptied ON line = xxhash64(stays.home, stays.queue)
        AND last_sequence >= from_sequence AND last_sequence < to_sequence
      UNION ALL
      SELECT home, queue, group_before, place, 0, message, sequence, at_ms, NULL
      FROM {{lines}} WHERE kind = 'Claimed' AND entered IS NOT NULL
      UNION ALL
      SELECT home, queue, of_group, message, 0, message, claimed, NULL, NULL
      FROM {{messages}} WHERE plain AND fifo AND claimed IS NOT NULL
    ), behind AS (
      SELECT *, max(left_at) OVER (PARTITION BY of_group, queue, home ORDER BY place, after
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS free_from
      FROM steps
    ), claims AS (
      SELECT *, lag(place) OVER (PARTITION BY of_group, queue, home, sequence >> {INDEX_BITS}
        ORDER BY sequence) AS place_before
      FROM behind WHERE after = 0
    )
    SELECT 'order in the group' AS `check`, home, message, queue, sequence, at_ms,
      'claimed before an earlier message of its group had left' AS detail
    FROM claims
    WHERE (place_before IS NULL AND sequence < free_from) OR place < place_before
"""

# What a queue held in each time between two emptyings, and what was said of it when that ended.
_LOST: Final = """
    WITH said AS (
      SELECT home, queue, sequence, kind, count, row_number() OVER (
        PARTITION BY home, queue ORDER BY sequence) - 1 AS nth
      FROM {marks} WHERE kind IN ('QueuePurged', 'QueueRemoved')
    ), met AS (
      SELECT coalesce(tally.home, said.home) AS home, coalesce(tally.queue, said.queue) AS queue,
        coalesce(held, 0) AS held, sequence, kind, count
      FROM {tally} AS tally FULL JOIN said ON tally.home = said.home AND tally.queue = said.queue
        AND tally.nth = said.nth
    )
    SELECT 'nothing lost' AS `check`, met.home AS home, CAST(NULL AS bigint) AS message,
      met.queue AS queue, coalesce(sequence, 0) AS sequence, CAST(NULL AS bigint) AS at_ms,
      CASE WHEN kind IS NULL AND counted IS NULL
          THEN concat(CAST(-held AS string), ' more messages left the queue than came')
        WHEN kind IS NULL THEN concat('the engine holds ', CAST(counted AS string),
          ', the journal ', CAST(held AS string))
        ELSE concat(kind, ' of ', CAST(count AS string), ' messages where the journal tells of ',
          CAST(held AS string)) END AS detail
    FROM met
    JOIN {homes} AS homes ON homes.home = met.home
    JOIN {stores} AS stores ON stores.store = homes.store
    LEFT JOIN {queues} AS queues ON queues.home = met.home AND queues.queue = met.queue
    -- A queue that is gone may have left its name to another.
    LEFT JOIN {engine} AS engine ON engine.name = queues.name AND removed = 0
    WHERE first_entry = 1
      AND CASE WHEN kind IS NULL THEN held < 0 OR held <> counted ELSE held <> count END
"""

_TERMS: Final = """
    WITH terms AS (
      SELECT store, shard, term, min(entry) AS first_entry FROM {events}
      WHERE kind <> 'Damaged' GROUP BY store, shard, term
    ), replaced AS (
      SELECT older.store, older.shard, older.term, min(newer.first_entry) AS at_entry
      FROM terms AS older JOIN terms AS newer ON newer.store = older.store
        AND newer.shard = older.shard AND newer.term > older.term
      GROUP BY older.store, older.shard, older.term
    )
    SELECT 'terms rise' AS `check`, xxhash64(events.store, events.shard) AS home, message, queue,
      sequence, at_ms, concat('an entry of term ', CAST(events.term AS string),
        ' after that term was replaced at entry ', CAST(at_entry AS string)) AS detail
    FROM {events} AS events JOIN replaced ON replaced.store = events.store
      AND replaced.shard = events.shard AND replaced.term = events.term
    WHERE entry > at_entry AND `index` = 0
"""

_GAPS: Final = f"""
    WITH entries AS (
      SELECT store, entry, max(shard) AS shard, max(at_ms) AS at_ms FROM {{events}}
      WHERE kind <> 'Damaged' GROUP BY store, entry
      UNION ALL SELECT store, first_entry - 1, shard, NULL FROM {{stores}}
      UNION ALL SELECT store, last_entry + 1, shard, NULL FROM {{stores}}
    ), steps AS (
      SELECT *, lag(entry) OVER (PARTITION BY store ORDER BY entry) AS previous FROM entries
    ), missing AS (
      SELECT store, shard, previous + 1 AS first, entry - 1 AS last, at_ms
      FROM steps WHERE entry > previous + 1
    ), told AS (
      SELECT store, entry, min_by(damage, `offset`) AS damage, min(`offset`) AS at_byte
      FROM {{events}} WHERE kind = 'Damaged' GROUP BY store, entry
    )
    SELECT 'no gaps' AS `check`, xxhash64(missing.store, shard) AS home,
      CAST(NULL AS bigint) AS message, CAST(NULL AS bigint) AS queue,
      first * {1 << INDEX_BITS} AS sequence, at_ms,
      concat(CASE WHEN first = last THEN concat('entry ', CAST(first AS string), ' is missing')
          ELSE concat('entries ', CAST(first AS string), ' to ', CAST(last AS string),
            ' are missing') END,
        coalesce(' (offset ' || CAST(at_byte AS string) || ': ' || damage || ')', '')) AS detail
    FROM missing LEFT JOIN told ON told.store = missing.store AND told.entry = missing.first
"""

# Findings with their store by name. A journal without its beginning cannot tell what was pushed.
_FOUND: Final = f"""
    SELECT `check`, homes.store AS store, homes.shard AS shard, message, queue,
      sequence >> {INDEX_BITS} AS entry, sequence, at_ms, detail
    FROM {{found}} AS found LEFT JOIN {{homes}} AS homes ON homes.home = found.home
    LEFT JOIN {{stores}} AS stores ON stores.store = homes.store
    WHERE `check` <> 'pushed first' OR first_entry = 1
"""

T = TypeVar("T")


class Runner(Protocol[T]):
    """What runs the SQL: Spark, or another engine beside it."""

    def ask(self, query: str, **tables: T) -> T:
        """The rows of a query over these tables, which it names in braces."""
        ...

    def keep(self, table: T, *, small: bool) -> T:
        """The same rows, computed once; `small` if they fit anywhere."""
        ...

    def send(self, table: T) -> T:
        """The same rows, of a few numbers each, for all events to be looked up in."""
        ...

    def any(self, table: T, condition: str) -> bool:
        """Whether a row is such."""
        ...


def check_all(runner: Runner[T], events: T, engine: T) -> tuple[T, T]:
    """Every finding: check, store, shard, message, queue, entry, sequence, at_ms, detail.

    `engine` has a row `name, counted` for each queue whose messages the engine has counted.
    Returned beside them: a row a store, with how many events it has.
    """
    ask, keep = runner.ask, runner.keep
    said = keep(ask(_SAID, events=events), small=True)
    marks = ask(_MARKS, said=said)
    queues = keep(ask(_QUEUES, marks=marks), small=True)
    stretches = keep(ask(_STRETCHES, marks=marks, queues=queues), small=True)
    folded = ask(_FOLDED, events=events)
    messages = keep(ask(_MESSAGES, folded=folded, stretches=stretches), small=False)
    odd = runner.send(ask(_ODD, messages=messages))
    rest = keep(ask(_REST, events=events, odd=odd), small=False)
    tally = ask(_TALLY, rest=rest, said=said, stretches=stretches, messages=messages)
    tally = keep(tally, small=True)
    homes = keep(ask(_HOMES, events=said), small=True)
    if runner.any(ask(_UNNAMED, tally=tally, homes=homes), "true"):
        homes = keep(ask(_HOMES, events=events), small=True)
    stores = keep(ask(_STORES, tally=tally, homes=homes), small=True)
    parts = {
        "lives": ask(_BY_MESSAGE, rest=rest, stretches=stretches),
        "dedup": ask(_DEDUP, rest=rest, stretches=stretches, messages=messages),
        "lost": ask(
            _LOST, tally=tally, marks=marks, homes=homes, stores=stores, queues=queues,
            engine=engine,
        ),
    }  # fmt: skip
    # What these look for takes a pass over everything; one number often says that it is not there.
    if runner.any(stores, "terms > 1"):
        parts["terms"] = ask(_TERMS, events=events)
    if runner.any(stores, "entries <= last_entry - first_entry"):
        parts["gaps"] = ask(_GAPS, events=events, stores=stores)
    if runner.any(queues, "fifo"):
        lines = keep(ask(_LINES, rest=rest, queues=queues), small=False)
        emptied = keep(ask(_EMPTIED, marks=marks, queues=queues), small=True)
        parts["groups"] = ask(_GROUPS, lines=lines, emptied=emptied, messages=messages)
    union = " UNION ALL ".join(f"SELECT * FROM {{{name}}}" for name in parts)
    found = ask(union, **parts)
    return ask(_FOUND, found=found, homes=homes, stores=stores), stores
