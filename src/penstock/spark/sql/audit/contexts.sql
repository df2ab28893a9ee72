-- A row for each part: a digest of all that its verdict depends on beside its own events, which is
-- what was known of the shard's queues up to the part's last event.
--
--   part     which
--   context  the digest
SELECT part, md5(coalesce(string_agg(concat_ws('/', queue, from_sequence,
    coalesce(last_emptied, -1), emptied_before, settings_known, coalesce(max_receives, -1),
    strict, coalesce(CAST(fifo AS varchar), '-'), coalesce(CAST(dedup_per_group AS varchar), '-')),
    ',' ORDER BY queue, from_sequence), '')) AS context
FROM parts LEFT JOIN periods ON periods.store = parts.store AND periods.shard = parts.shard
  AND from_sequence <= last_sequence
  AND coalesce(created_entry <= last_sequence >> {INDEX_BITS}, true)
GROUP BY part
