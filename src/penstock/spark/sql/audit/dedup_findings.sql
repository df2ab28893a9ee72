-- Findings of `one message per dedup id`: a push of a part that is judged, and an earlier one with its
-- id, in any part, whose window had not passed. Columns as in `message_findings`.
WITH pushes AS (
  SELECT part, key, queue_number AS queue, pushed AS sequence, pushed_at_ms AS at_ms, dedup_id, `group`
  FROM near_messages WHERE regular AND dedup_id IS NOT NULL
  UNION ALL
  SELECT part, key, queue, sequence, at_ms, dedup_id, `group`
  FROM near_events WHERE code = {Pushed} AND dedup_id IS NOT NULL
), compared AS (
  -- A purge of a FIFO queue clears its dedup window. Of a queue whose settings are not known
  -- the narrower window is taken.
  SELECT pushes.*, max(named_struct('at_ms', at_ms, 'key', key)) OVER (
    PARTITION BY dedup_id, shiftright(key, {MESSAGE_BITS}), pushes.queue,
      if(coalesce(fifo, true), coalesce(emptied_before, 0), 0),
      if(coalesce(dedup_per_group, true), `group`, NULL)
    ORDER BY sequence ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS latest
  FROM pushes LEFT JOIN periods
    ON periods.queue_key = shiftright(key, {MESSAGE_BITS}) * {QUEUES} + pushes.queue
      AND sequence >= from_sequence AND sequence < to_sequence
)
SELECT 'one message per dedup id' AS check, part, key, queue, sequence, at_ms,
  concat('its dedup id made message ', CAST(latest.key & ((1L << {MESSAGE_BITS}) - 1) AS string), ' ',
    CAST(at_ms - latest.at_ms AS string), ' ms before') AS detail
FROM compared LEFT SEMI JOIN judged_parts USING (part)
WHERE at_ms < latest.at_ms + {DEDUP_WINDOW_MS}
