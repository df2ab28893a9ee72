-- A row for each term of a shard that a later one replaced.
--
--   store, shard, term  which
--   at_entry            the first entry of a later term
--   is_used             whether the term has an entry after that
WITH entries AS (
  SELECT store, shard, term, first_entry, last_entry FROM balances
  UNION ALL
  SELECT store, shard, term, entry, entry FROM queue_events WHERE kind <> 'Damaged'
), terms AS (
  SELECT store, shard, term, min(first_entry) AS first_entry, max(last_entry) AS last_entry
  FROM entries GROUP BY store, shard, term
)
SELECT older.store, older.shard, older.term, min(newer.first_entry) AS at_entry,
  max(older.last_entry) > min(newer.first_entry) AS is_used
FROM terms AS older JOIN terms AS newer ON newer.store = older.store
  AND newer.shard = older.shard AND newer.term > older.term
GROUP BY older.store, older.shard, older.term
