-- A row for each queue and time between two emptyings, with counts of all events. Damage and events
-- of unknown queues are counted too, under the queue's number.
--
--   shard_key                hash of the store and the shard
--   queue                    its number
--   emptied_before           how many times it had been emptied
--   events                   how many there are
--   held                     messages that came in, less those that left
--   held_before              messages that were there before their first event in the journal
--   first_entry, last_entry  of the journal
--   entries                  how many entries begin with one of these events
--   first_term, last_term    least and greatest
WITH moves AS (
  SELECT shard_key, queue, sequence, kind, term, CASE WHEN kind = 'Pushed' THEN 1
      WHEN kind IN ('Deleted', 'Expired', 'Lost', 'Moved') THEN -1 ELSE 0 END AS held,
    0 AS held_before, 1 AS events, sequence >> {INDEX_BITS} AS entry
  FROM {irregular_events}
  UNION ALL
  SELECT shard_key, to_queue, sequence, kind, term, 1, 0, 0, sequence >> {INDEX_BITS}
  FROM {irregular_events} WHERE kind = 'Moved'
  UNION ALL
  SELECT shard_key, queue, sequence, kind, term, 0, 0, 1, entry FROM {queue_events}
  UNION ALL
  SELECT shard_key, min_by(queue, sequence), 0, 'Carried', NULL, 0, 1, 0, 0
  FROM {irregular_events}
  GROUP BY message, shard_key HAVING min_by(kind, sequence) <> 'Pushed'
), counted AS (
  SELECT shard_key, moves.queue AS queue, coalesce(emptied_before, 0) AS emptied_before, events,
    held, held_before,
    CASE WHEN entry > 0 THEN entry END AS first_entry, entry AS last_entry,
    CASE WHEN events = 1 AND kind <> 'Damaged' AND sequence % {ENTRY_SPAN} = 0
      THEN 1 ELSE 0 END AS entries,
    CASE WHEN kind <> 'Damaged' THEN term END AS first_term, term AS last_term
  FROM moves LEFT JOIN {periods} AS periods ON queue_key = xxhash64(shard_key, moves.queue)
    AND sequence >= from_sequence AND sequence < to_sequence
  UNION ALL
  SELECT shard_key, queue, emptied_before,
    1 + CASE WHEN claimed IS NULL THEN 0 ELSE 1 END
      + CASE WHEN deleted IS NULL THEN 0 ELSE 1 END,
    CASE WHEN deleted IS NULL THEN 1 ELSE 0 END, 0, pushed >> {INDEX_BITS},
    coalesce(deleted, claimed, pushed) >> {INDEX_BITS},
    CASE WHEN pushed % {ENTRY_SPAN} = 0 THEN 1 ELSE 0 END
      + CASE WHEN claimed % {ENTRY_SPAN} = 0 THEN 1 ELSE 0 END
      + CASE WHEN deleted % {ENTRY_SPAN} = 0 THEN 1 ELSE 0 END, term, term
  FROM {messages} WHERE plain
)
SELECT shard_key, queue, emptied_before, sum(events) AS events, sum(held) AS held,
  sum(held_before) AS held_before, min(first_entry) AS first_entry,
  max(last_entry) AS last_entry, sum(entries) AS entries,
  min(first_term) AS first_term, max(last_term) AS last_term
FROM counted GROUP BY shard_key, queue, emptied_before
