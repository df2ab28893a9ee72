-- The shards by name.
--
--   store, shard  whose journal
--   shard_key     hash of the store and the shard
SELECT DISTINCT store, shard, xxhash64(store, shard) AS shard_key FROM {events}
