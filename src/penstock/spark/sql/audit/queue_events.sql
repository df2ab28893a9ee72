-- A row for each event that names no message: those of queues, and damage.
-- There are few, and most other steps need them.
--
--   store, shard           whose journal
--   shard_key              hash of the store and the shard
--   term, entry, sequence  where in the journal; entry 0 where damage left it unknown
--   kind, queue, name      the event, the queue's number, and its name if the event gives one
--   count                  how many messages a purge or removal ended
--   has_settings           whether the event gives the queue's settings; the next four are of them
--   max_receives, dead_letter, fifo, dedup_per_group
--                          null if the event gives none
SELECT store, shard, xxhash64(store, shard) AS shard_key, term, entry, sequence, kind, queue, name,
  count, extra IS NOT NULL AS has_settings,
  CAST(get_json_object(extra, '$.settings.max_receives') AS bigint) AS max_receives,
  get_json_object(extra, '$.settings.dead_letter') AS dead_letter,
  CASE WHEN extra IS NOT NULL THEN coalesce(
    CAST(get_json_object(extra, '$.settings.fifo') AS boolean), false) END AS fifo,
  CASE WHEN extra IS NOT NULL THEN coalesce(
    CAST(get_json_object(extra, '$.settings.dedup_per_group') AS boolean), false) END
    AS dedup_per_group
FROM {events} WHERE message IS NULL
