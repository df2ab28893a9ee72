-- A row for each queue and number of claims: what the messages of a part add to it.
--
--   store, queue, claims     which
--   messages, timeouts, releases, deleted, dead_letters
--                            as in `redeliveries`
--   dead                     messages that are in a dead-letter queue now, or on their way to one
WITH counted AS (
  SELECT part_number, queue_number, claims, count(*) AS messages, sum(timeouts) AS timeouts,
    sum(releases) AS releases, count_if(state = 'deleted') AS deleted,
    sum(dead_letters) AS dead_letters,
    count_if(state IN ('dead', 'departed', 'arrived')) AS dead
  FROM lives WHERE claims > 0 GROUP BY ALL
)
SELECT part.store, part_number, coalesce(queue, concat('#', counted.queue_number)) AS queue,
  claims, sum(messages) AS messages, sum(timeouts) AS timeouts, sum(releases) AS releases,
  sum(deleted) AS deleted, sum(dead_letters) AS dead_letters, sum(dead) AS dead
FROM counted LEFT JOIN queue_names ON queue_names.queue_number = counted.queue_number, part
GROUP BY ALL ORDER BY queue, claims
