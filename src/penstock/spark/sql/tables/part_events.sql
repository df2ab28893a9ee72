-- A row for each queue, minute and kind of event of the parts that are made. Those of a regular
-- life are counted from its row in `folds`.
--
--   part_number, queue_number, minute, kind  which; minutes since 1970
--   events, entries, bytes                   in it; entries that begin with one of these events
--   last_at_ms                               when the newest of them happened
WITH counted AS (
  SELECT lives.part_number, events.queue AS queue_number, kind, at_ms, sequence, events.body_bytes
  FROM events JOIN eventful_lives AS lives USING (message)
  UNION ALL
  SELECT part_number, queue, 'Pushed', pushed_ms, pushed, body_bytes
  FROM folds WHERE regular
  UNION ALL
  SELECT part_number, queue, 'Claimed', claimed_ms, claimed, NULL
  FROM folds WHERE regular AND claimed IS NOT NULL
  UNION ALL
  SELECT part_number, queue, 'Deleted', deleted_ms, deleted, NULL
  FROM folds WHERE regular AND deleted IS NOT NULL
)
SELECT part_number, queue_number, at_ms // {BUCKET_MS} AS minute, kind, count(*) AS events,
  count(*) FILTER (WHERE sequence % {ENTRY_SPAN} = 0) AS entries,
  coalesce(sum(body_bytes), 0) AS bytes, max(at_ms) AS last_at_ms
FROM counted GROUP BY ALL
