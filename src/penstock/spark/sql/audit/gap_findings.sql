-- Findings of `no gaps`: ranges of entries that are missing, with the damage found there.
--
--   check         which check failed, by its name in `CHECKS`
--   store, shard  whose journal
--   message       null: the finding is about no message
--   queue         null
--   sequence      where the gap begins
--   at_ms         when the first event after it happened, null if not known
--   detail        the finding in words
WITH entries AS (
  SELECT store, entry, max(shard) AS shard, max(at_ms) AS at_ms FROM all_events
  WHERE kind <> 'Damaged' GROUP BY store, entry
  UNION ALL SELECT store, first_entry - 1, 0, NULL FROM stores
  UNION ALL SELECT store, last_entry + 1, 0, NULL FROM stores
), steps AS (
  SELECT *, lag(entry) OVER (PARTITION BY store ORDER BY entry) AS previous FROM entries
), missing AS (
  SELECT store, shard, previous + 1 AS first, entry - 1 AS last, at_ms
  FROM steps WHERE entry > previous + 1
), damaged AS (
  SELECT store, entry, min_by(damage, offset) AS damage, min(offset) AS at_byte
  FROM queue_events WHERE kind = 'Damaged' GROUP BY store, entry
)
SELECT 'no gaps' AS check, missing.store, shard, CAST(NULL AS bigint) AS message,
  CAST(NULL AS bigint) AS queue, first * {ENTRY_SPAN} AS sequence, at_ms,
  concat(CASE WHEN first = last THEN concat('entry ', CAST(first AS string), ' is missing')
      ELSE concat('entries ', CAST(first AS string), ' to ', CAST(last AS string),
        ' are missing') END,
    coalesce(concat(' (offset ', CAST(at_byte AS string), ': ', damage, ')'), '')) AS detail
FROM missing LEFT JOIN damaged
  ON damaged.store = missing.store AND damaged.entry = missing.first
