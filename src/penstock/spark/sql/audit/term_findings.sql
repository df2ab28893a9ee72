-- Findings of `terms rise`.
--
--   check      which check failed, by its name in `CHECKS`
--   shard_key  hash of the store and the shard
--   message    its number, null if the finding is about no message
--   queue      the queue's number
--   sequence   the event that breaks the check, or where the gap begins
--   at_ms      when it happened, null if not known
--   detail     the finding in words
WITH terms AS (
  SELECT store, shard, term, min(entry) AS first_entry FROM {events}
  WHERE kind <> 'Damaged' GROUP BY store, shard, term
), replaced AS (
  SELECT older.store, older.shard, older.term, min(newer.first_entry) AS at_entry
  FROM terms AS older JOIN terms AS newer ON newer.store = older.store
    AND newer.shard = older.shard AND newer.term > older.term
  GROUP BY older.store, older.shard, older.term
)
SELECT 'terms rise' AS `check`, xxhash64(events.store, events.shard) AS shard_key, message, queue,
  sequence, at_ms, concat('an entry of term ', CAST(events.term AS string),
    ' after that term was replaced at entry ', CAST(at_entry AS string)) AS detail
FROM {events} AS events JOIN replaced ON replaced.store = events.store
  AND replaced.shard = events.shard AND replaced.term = events.term
WHERE entry > at_entry AND `index` = 0
