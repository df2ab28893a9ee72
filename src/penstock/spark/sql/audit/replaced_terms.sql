-- A row for each term of a shard that a later one replaced.
--
--   store, shard, term  which
--   at_entry            the first entry of a later term
WITH terms AS (
  SELECT store, shard, term, min(first_entry) AS first_entry FROM (
    SELECT store, shard, term, first_entry FROM balances
    UNION ALL
    SELECT store, shard, term, entry FROM queue_events WHERE kind <> 'Damaged')
  GROUP BY store, shard, term
)
SELECT older.store AS store, older.shard AS shard, older.term AS term,
  min(newer.first_entry) AS at_entry
FROM terms AS older JOIN terms AS newer ON newer.store = older.store
  AND newer.shard = older.shard AND newer.term > older.term
GROUP BY older.store, older.shard, older.term
