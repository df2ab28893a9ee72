-- A row for each queue: what the messages of a part add to its status.
--
--   store, shard, queue_number  which queue
--   visible, delayed, in_flight, messages, stored_bytes, oldest_pushed_at_ms
--                               of those it holds
--   purged                      how many a purge ended in it
--   unpushed                    how many have no push, having come before the journal's beginning
--   pushed, deleted, expired, lost, arrived, left
--                               events of it
--   last_at_ms                  when its newest event happened
WITH held AS (
  SELECT part_number, held_in_number AS queue_number,
    count_if(standing = 'visible') AS visible, count_if(standing = 'delayed') AS delayed,
    count_if(standing = 'in_flight') AS in_flight, count(standing) AS messages,
    coalesce(sum(body_bytes) FILTER (WHERE standing IS NOT NULL), 0) AS stored_bytes,
    min(pushed_at_ms) FILTER (WHERE standing IS NOT NULL) AS oldest_pushed_at_ms,
    count_if(state = 'purged') AS purged, count_if(pushed_at_ms IS NULL) AS unpushed
  FROM lives GROUP BY ALL
), counted AS (
  SELECT part_number, queue_number,
    sum(events) FILTER (WHERE kind = 'Pushed') AS pushed,
    sum(events) FILTER (WHERE kind = 'Deleted') AS deleted,
    sum(events) FILTER (WHERE kind = 'Expired') AS expired,
    sum(events) FILTER (WHERE kind = 'Lost') AS lost,
    sum(events) FILTER (WHERE kind IN ('Moved', 'Departed')) AS "left",
    max(last_at_ms) AS last_at_ms
  FROM part_events GROUP BY ALL
), came AS (
  SELECT part_number, to_queue AS queue_number, count(*) AS arrived
  FROM events JOIN eventful_lives USING (message) WHERE kind = 'Moved' GROUP BY ALL
)
SELECT part.store, part.shard, part_number, queue_number, coalesce(visible, 0) AS visible,
  coalesce(delayed, 0) AS delayed, coalesce(in_flight, 0) AS in_flight,
  coalesce(messages, 0) AS messages, coalesce(stored_bytes, 0) AS stored_bytes,
  oldest_pushed_at_ms, coalesce(purged, 0) AS purged, coalesce(unpushed, 0) AS unpushed,
  coalesce(pushed, 0) AS pushed, coalesce(deleted, 0) AS deleted, coalesce(expired, 0) AS expired,
  coalesce(lost, 0) AS lost, coalesce(arrived, 0) AS arrived, coalesce("left", 0) AS "left",
  last_at_ms
FROM held FULL JOIN counted USING (part_number, queue_number)
FULL JOIN came USING (part_number, queue_number), part
