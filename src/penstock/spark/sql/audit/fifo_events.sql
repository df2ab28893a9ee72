-- A row for each event in a FIFO queue of a message whose life is not plain, with what was known
-- of the message before it.
--
--   message       its number
--   part_number   of its part among those that are judged, null if it is of another
--   sequence, kind, queue, at_ms, to_queue, group_hash
--                 the event
--   entered       where it was pushed, or moved to this queue
--   group_before  the hash of its group, 0 if it has none, null if not known
SELECT message, part_number, sequence, kind, life_events.queue AS queue, at_ms, to_queue,
  group_hash,
  last_value(CASE WHEN kind IN ('Pushed', 'Moved') THEN sequence END IGNORE NULLS)
    OVER earlier AS entered,
  last_value(CASE WHEN kind = 'Pushed' THEN coalesce(group_hash, 0) END IGNORE NULLS)
    OVER earlier AS group_before
FROM life_events
WHERE kind <> 'Carried' AND queue IN (SELECT queue FROM periods WHERE fifo)
WINDOW earlier AS (PARTITION BY message ORDER BY sequence
  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
