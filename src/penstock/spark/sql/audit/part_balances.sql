-- A row for each judged part, queue, time between two emptyings and term, with counts of events.
--
--   part                     which
--   queue                    its number
--   emptied_before           how many times it had been emptied
--   term                     of the owner that wrote them
--   events                   how many there are
--   held                     messages that came in, less those that left
--   held_before              messages that were there before their first event in the journal
--   first_entry, last_entry  of the journal
--   entries                  how many entries begin with one of these events
WITH moves AS (
  SELECT part, queue, sequence, term, CASE WHEN code = {Pushed} THEN 1
      WHEN {LEFT_QUEUE} THEN -1 ELSE 0 END AS held, 0 AS held_before, 1 AS events
  FROM life_events
  UNION ALL
  SELECT part, to_queue, sequence, term, 1, 0, 0 FROM life_events WHERE code = {Moved}
  UNION ALL
  SELECT part, min_by(queue, sequence), 0, min_by(term, sequence), 0,
    -- What departed before the journal's beginning was in no queue then.
    if(bool_or(code = {Arrived}) AND NOT bool_or(code = {Departed}), 0, 1), 0
  FROM life_events GROUP BY part, key HAVING min_by(CAST(code AS int), sequence) <> {Pushed}
), counted AS (
  SELECT part, moves.queue, coalesce(emptied_before, 0) AS emptied_before, term, events, held,
    held_before, if(sequence = 0, NULL, sequence div {ENTRY_SPAN}) AS first_entry,
    if(sequence = 0, NULL, sequence div {ENTRY_SPAN}) AS last_entry,
    CAST(events = 1 AND sequence % {ENTRY_SPAN} = 0 AS int) AS entries
  FROM moves LEFT JOIN periods
    ON periods.queue_key = shiftright(part, {MESSAGE_BITS}) * {QUEUES} + moves.queue
      AND sequence >= from_sequence AND sequence < to_sequence
  UNION ALL
  SELECT part, queue_number, emptied_before, term, events, CAST(deleted IS NULL AS int), 0,
    pushed div {ENTRY_SPAN}, coalesce(deleted, claimed, pushed) div {ENTRY_SPAN},
    CAST(pushed % {ENTRY_SPAN} = 0 AS int) + coalesce(CAST(claimed % {ENTRY_SPAN} = 0 AS int), 0)
      + coalesce(CAST(deleted % {ENTRY_SPAN} = 0 AS int), 0)
  FROM regular_lives WHERE plain
)
SELECT store, shard, queue, emptied_before, term, sum(events) AS events, sum(held) AS held,
  sum(held_before) AS held_before, min(first_entry) AS first_entry,
  max(last_entry) AS last_entry, sum(entries) AS entries, judged, part
FROM counted JOIN judged_parts USING (part) JOIN journals ON journal = shiftright(part, {MESSAGE_BITS})
GROUP BY part, judged, store, shard, queue, emptied_before, term
