-- Findings of `one message per dedup id`: a push of a part that is judged, and an earlier
-- one with its id, in
-- any part, whose window had not passed.
--
--   check      which check failed, by its name in `CHECKS`
--   part_number, message
--              the number of its part among those that are judged, and its own
--   queue      the queue's number
--   sequence   the push that breaks the check
--   at_ms      when it happened
--   detail     the finding in words
WITH pushes AS (
  SELECT message, part_number, life_events.queue AS queue, sequence, at_ms, dedup_hash, group_hash,
    fifo, dedup_per_group, emptied_before
  FROM life_events LEFT JOIN spanned_periods AS periods
    ON periods.queue = life_events.queue AND span = span_of(sequence)
      AND sequence >= from_sequence AND sequence < to_sequence
  WHERE kind = 'Pushed' AND dedup_hash IS NOT NULL
  UNION ALL
  SELECT message, part_number, queue, pushed, pushed_ms, dedup_hash, group_hash, fifo,
    dedup_per_group, emptied_before
  FROM messages WHERE plain AND dedup_hash IS NOT NULL
), compared AS (
  -- A purge of a FIFO queue clears its dedup window. Of a queue whose settings are not known
  -- the narrower window is taken.
  SELECT pushes.*, max((at_ms, message)) OVER same AS latest
  FROM pushes
  WINDOW same AS (PARTITION BY dedup_hash, queue,
    CASE WHEN coalesce(fifo, true) THEN coalesce(emptied_before, 0) ELSE 0 END,
    CASE WHEN coalesce(dedup_per_group, true) THEN group_hash END
    ORDER BY sequence ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT 'one message per dedup id' AS "check", part_number, message, queue, sequence, at_ms,
  concat('its dedup id made message ', CAST(latest[2] AS varchar), ' ',
    CAST(at_ms - latest[1] AS varchar), ' ms before') AS detail
FROM compared WHERE part_number IS NOT NULL AND at_ms < latest[1] + {DEDUP_WINDOW_MS}
