-- A row for each judged part, queue, time between two emptyings and term, with counts of events.
--
--   part_number              of the part among those that are judged
--   queue                    its number
--   emptied_before           how many times it had been emptied
--   term                     of the owner that wrote them
--   events                   how many there are
--   held                     messages that came in, less those that left
--   held_before              messages that were there before their first event in the journal
--   first_entry, last_entry  of the journal
--   entries                  how many entries begin with one of these events
WITH moves AS (
  SELECT part_number, queue, sequence, term, CASE WHEN kind = 'Pushed' THEN 1
      WHEN {LEFT_QUEUE} THEN -1 ELSE 0 END AS held,
    0 AS held_before, 1 AS events, sequence >> {INDEX_BITS} AS entry
  FROM life_events WHERE part_number IS NOT NULL
  UNION ALL
  SELECT part_number, to_queue, sequence, term, 1, 0, 0, sequence >> {INDEX_BITS}
  FROM life_events WHERE part_number IS NOT NULL AND kind = 'Moved'
  UNION ALL
  SELECT any_value(part_number), arg_min(queue, sequence), 0, arg_min(term, sequence), 0,
    -- What departed before the journal's beginning was in no queue then.
    CASE WHEN bool_or(kind = 'Arrived') AND NOT bool_or(kind = 'Departed') THEN 0 ELSE 1 END, 0,
    arg_min(sequence, sequence) >> {INDEX_BITS}
  FROM life_events
  WHERE part_number IS NOT NULL AND message NOT IN (SELECT message FROM ended_before)
  GROUP BY message HAVING arg_min(kind, sequence) <> 'Pushed'
), counted AS (
  SELECT part_number, moves.queue AS queue, coalesce(emptied_before, 0) AS emptied_before, term,
    events, held, held_before, entry AS first_entry, entry AS last_entry,
    CAST(events = 1 AND sequence % {ENTRY_SPAN} = 0 AS int) AS entries
  FROM moves LEFT JOIN spanned_periods AS periods
    ON periods.queue = moves.queue AND span = span_of(sequence)
      AND sequence >= from_sequence AND sequence < to_sequence
  UNION ALL
  SELECT part_number, queue, emptied_before, term, events, CAST(deleted IS NULL AS int), 0,
    pushed >> {INDEX_BITS}, coalesce(deleted, claimed, pushed) >> {INDEX_BITS},
    CAST(pushed % {ENTRY_SPAN} = 0 AS int) + coalesce(CAST(claimed % {ENTRY_SPAN} = 0 AS int), 0)
      + coalesce(CAST(deleted % {ENTRY_SPAN} = 0 AS int), 0)
  FROM messages WHERE part_number IS NOT NULL AND plain
)
SELECT part_number, queue, emptied_before, term, sum(events) AS events, sum(held) AS held,
  sum(held_before) AS held_before, min(first_entry) AS first_entry,
  max(last_entry) AS last_entry, sum(entries) AS entries
FROM counted GROUP BY part_number, queue, emptied_before, term
