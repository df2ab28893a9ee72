-- A row for each queue that an event of queues names: what queries over messages need of it.
--
--   queue_key       its journal's number and its own, as one number
--   queue           its name, null if no event gives it
--   ends            its purges and removal
--   is_dead_letter  whether another queue's settings name it
SELECT journal * {QUEUES} + queue_number AS queue_key, queue, ends,
  coalesce(queue IN (SELECT get_json_object(extra, '$.settings.dead_letter') FROM queue_settings),
    false) AS is_dead_letter
FROM queue_settings JOIN (SELECT store, journal FROM journals) USING (store)
