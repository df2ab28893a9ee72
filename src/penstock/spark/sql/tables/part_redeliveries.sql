-- A row for each queue and number of claims: what the messages of a part add to it.
--
--   store, queue, claims     which
--   messages, timeouts, releases, deleted, dead_letters
--                            as in `redeliveries`
--   dead                     messages that are in a dead-letter queue now, or on their way to one
SELECT store, queue, claims, count(*) AS messages, sum(timeouts) AS timeouts,
  sum(releases) AS releases, count_if(state = 'deleted') AS deleted,
  sum(dead_letters) AS dead_letters, count_if(state IN ('dead', 'departed', 'arrived')) AS dead
FROM messages WHERE claims > 0 GROUP BY store, queue, claims ORDER BY queue, claims
