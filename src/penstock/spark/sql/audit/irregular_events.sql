-- Every event of the messages whose lives are not plain.
--
--   shard_key               hash of the store and the shard
--   message                 its number
--   sequence, kind, at_ms, queue, term, epoch, dead
--                           as in the journal
--   until_ms                a claim's deadline, or the end of a delay
--   expires_at_ms, to_queue, rank
--                           as in the journal
--   group_hash, dedup_hash  hashes of its group and its dedup id, null if it has none
SELECT irregular_shard AS shard_key, message, sequence, kind, at_ms, queue, term, epoch, dead,
  coalesce(deadline_ms, visible_at_ms) AS until_ms, expires_at_ms, to_queue, rank,
  CASE WHEN `group` IS NOT NULL THEN xxhash64(`group`, 0) END AS group_hash,
  CASE WHEN dedup_id IS NOT NULL THEN xxhash64(dedup_id, 0) END AS dedup_hash
FROM {events} JOIN {irregular} AS irregular
  ON irregular_message = message AND irregular_shard = xxhash64(store, shard)
