-- Every finding with its store by name. A journal that has lost its beginning does not say what
-- was pushed before: there, `pushed first` is not checked.
--
--   check            which check failed
--   store, shard     whose journal
--   message, queue   numbers, null if it is about none
--   entry, sequence  where
--   at_ms            when, null if not known
--   detail           the finding in words
SELECT `check`, shards.store AS store, shards.shard AS shard, message, queue,
  sequence >> {INDEX_BITS} AS entry, sequence, at_ms, detail
FROM {found} AS found LEFT JOIN {shards} AS shards ON shards.shard_key = found.shard_key
LEFT JOIN {stores} AS stores ON stores.store = shards.store
WHERE `check` <> 'pushed first' OR first_entry = 1
