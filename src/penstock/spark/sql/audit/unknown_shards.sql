-- The shards that have no events of queues, so that `shards` does not know them yet.
--
--   shard_key  hash of the store and the shard
SELECT balances.shard_key
FROM {balances} AS balances LEFT JOIN {shards} AS shards
  ON shards.shard_key = balances.shard_key
WHERE store IS NULL
