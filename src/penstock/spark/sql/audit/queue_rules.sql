-- A row for each queue that an event of queues names.
--
--   store, shard, queue_key, queue
--                          which queue
--   name                   its name, null if its creation is not in the journal
--   fifo, dedup_per_group  of its settings, null if no event gives them
--   dead_letter            the name of its dead-letter queue
--   removed                1 if it was removed, or else 0
--   created_entry          the entry of its creation, null if that is not in the journal
--   settings_entry         the first entry with its settings, 0 if they are older than the journal
--   never_changed          whether every event gives the same limit and dead-letter queue
--   known_from_start       whether its first settings are those it had when the journal begins:
--                          they were not given by a change
--   strict                 whether a message moves at the limit exactly: it never changed, and
--                          the dead-letter queue existed all the time
WITH known AS (
  SELECT store, shard, queue_key, queue, max(name) AS name, bool_or(fifo) AS fifo,
    bool_or(dedup_per_group) AS dedup_per_group, max(dead_letter) AS dead_letter,
    max(CAST(kind = 'QueueRemoved' AS int)) AS removed,
    min(if(kind = 'QueueCreated', entry, NULL)) AS created_entry,
    if(bool_or(kind = 'QueueCreated'), min(if(has_settings, entry, NULL)), 0) AS settings_entry,
    count(DISTINCT if(has_settings, concat(coalesce(CAST(max_receives AS string), ''), '/',
      coalesce(dead_letter, '')), NULL)) = 1 AS never_changed,
    coalesce(min(if(has_settings AND kind <> 'QueueConfigured', sequence, NULL))
      <= min(if(has_settings, sequence, NULL)), false) AS known_from_start
  FROM queue_changes GROUP BY store, shard, queue_key, queue
), lasting AS (
  SELECT store, shard, name, coalesce(max(created_entry), 0) AS since_entry
  FROM known GROUP BY store, shard, name
  HAVING count(*) = 1 AND max(removed) = 0
)
SELECT known.*,
  never_changed AND known_from_start AND coalesce(since_entry <= settings_entry, false) AS strict
FROM known LEFT JOIN lasting ON lasting.store = known.store AND lasting.shard = known.shard
  AND lasting.name = known.dead_letter
