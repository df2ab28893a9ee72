-- A row for each message: where its events are if its life is plain. Every column is an aggregate
-- that does not depend on the order in which events are read.
--
--   shard_key               hash of the store and the shard
--   message                 its number
--   events                  how many there are
--   pushed                  the sequence of a push without delay
--   claimed, deleted        the sequence of the first claim and of a delete by it
--   pushed_ms               when it was pushed
--   group_hash, dedup_hash  hashes of its group and its dedup id, null if it has none
--   queue, least_queue, term, least_term
--                           greatest and least: equal if there is only one
SELECT xxhash64(store, shard) AS shard_key, message, count(*) AS events,
  max(CASE WHEN kind = 'Pushed' AND visible_at_ms IS NULL THEN sequence END) AS pushed,
  max(CASE WHEN kind = 'Claimed' AND epoch = 1 THEN sequence END) AS claimed,
  max(CASE WHEN kind = 'Deleted' AND epoch = 1 THEN sequence END) AS deleted,
  max(CASE WHEN kind = 'Pushed' THEN at_ms END) AS pushed_ms,
  max(CASE WHEN `group` IS NOT NULL THEN xxhash64(`group`, 0) END) AS group_hash,
  max(CASE WHEN dedup_id IS NOT NULL THEN xxhash64(dedup_id, 0) END) AS dedup_hash,
  max(queue) AS queue, min(queue) AS least_queue, max(term) AS term, min(term) AS least_term
FROM {events} WHERE message IS NOT NULL
GROUP BY message, xxhash64(store, shard)
