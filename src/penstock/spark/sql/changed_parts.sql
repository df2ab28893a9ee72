-- The parts with rows that new events of queues change though they name no message: a purge or a
-- removal ends the messages that a queue holds, a queue that had only a number may have a name now,
-- and a new dead-letter queue may be where messages without a push are.
WITH numbers AS (
  SELECT store, journal FROM journals
), renamed AS (
  SELECT journal, queue_number FROM queues JOIN queue_settings AS known
    USING (store, shard, queue_number) JOIN numbers USING (store)
  WHERE queues.queue <> known.queue
), emptied AS (
  SELECT DISTINCT journal, queue AS queue_number FROM new_queue_events JOIN numbers USING (store)
  WHERE kind IN ('QueuePurged', 'QueueRemoved')
), reset AS (
  SELECT DISTINCT journal FROM queue_settings AS known JOIN numbers USING (store)
  LEFT JOIN queues USING (store, shard, queue_number)
  WHERE NOT queues.dead_letter <=> get_json_object(known.extra, '$.settings.dead_letter')
), kept AS (
  SELECT shiftright(part, {MESSAGE_BITS}) AS journal, * FROM rollup
)
SELECT part FROM kept LEFT SEMI JOIN renamed USING (journal, queue_number)
UNION
SELECT part FROM kept LEFT SEMI JOIN emptied USING (journal, queue_number)
WHERE what = 'held' AND live > 0
UNION
SELECT part FROM kept LEFT SEMI JOIN reset USING (journal)
WHERE what = 'held' AND unpushed > 0
