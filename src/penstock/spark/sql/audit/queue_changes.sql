-- The events of queues, without damage, with the settings of the queue that checks need.
--
--   store, shard           whose journal
--   queue_key              the journal's number and the queue's, as one number
--   queue, sequence, entry, kind, name
--                          the event; the name is null if the event does not give it
--   count                  how many messages a purge or removal ended
--   has_settings           whether the event gives the queue's settings; the next four are of them
--   max_receives, dead_letter, fifo, dedup_per_group
--                          null if the event gives none
SELECT store, shard, journal * {QUEUES} + queue AS queue_key, queue, sequence, entry, kind, name,
  count, extra IS NOT NULL AS has_settings,
  CAST(get_json_object(extra, '$.settings.max_receives') AS bigint) AS max_receives,
  get_json_object(extra, '$.settings.dead_letter') AS dead_letter,
  if(extra IS NULL, NULL, coalesce(
    CAST(get_json_object(extra, '$.settings.fifo') AS boolean), false)) AS fifo,
  if(extra IS NULL, NULL, coalesce(
    CAST(get_json_object(extra, '$.settings.dedup_per_group') AS boolean), false))
    AS dedup_per_group
FROM queue_events JOIN (SELECT store, journal FROM journals) USING (store)
WHERE kind <> 'Damaged'
