-- The events of queues, without damage, with the settings of the queue that checks need.
--
--   store, shard           whose journal
--   queue, sequence, entry, kind, name
--                          the event; the name is null if the event does not give it
--   count                  how many messages a purge or removal ended
--   has_settings           whether the event gives the queue's settings; the next four are of them
--   max_receives, dead_letter, fifo, dedup_per_group
--                          null if the event gives none
SELECT store, shard, queue, sequence, entry, kind, name, count, extra IS NOT NULL AS has_settings,
  CAST(json_extract_string(extra, '$.settings.max_receives') AS bigint) AS max_receives,
  json_extract_string(extra, '$.settings.dead_letter') AS dead_letter,
  CASE WHEN extra IS NOT NULL THEN coalesce(
    CAST(json_extract_string(extra, '$.settings.fifo') AS boolean), false) END AS fifo,
  CASE WHEN extra IS NOT NULL THEN coalesce(
    CAST(json_extract_string(extra, '$.settings.dedup_per_group') AS boolean), false) END
    AS dedup_per_group
FROM queue_events WHERE kind <> 'Damaged'
