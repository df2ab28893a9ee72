-- A row for each store.
--
--   store                    its identity
--   shard                    one of its shards
--   first_entry, last_entry  of its journal
--   entries                  how many entries there are in between
--   events                   how many events
--   terms                    1 if every event is of one term
SELECT store, min(shard) AS shard, min(first_entry) AS first_entry,
  max(last_entry) AS last_entry, sum(entries) AS entries, sum(events) AS events,
  1 + max(last_term) - min(first_term) AS terms
FROM {balances} AS balances JOIN {shards} AS shards ON shards.shard_key = balances.shard_key
GROUP BY store
