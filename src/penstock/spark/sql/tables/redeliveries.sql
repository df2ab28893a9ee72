-- A row for each queue and number of claims. Columns: docs/formats/lake.md.
SELECT store, queue, claims, count(*) AS messages, sum(timeouts) AS timeouts,
  sum(releases) AS releases, count_if(state = 'deleted') AS deleted,
  sum(dead_letters) AS dead_letters
FROM {messages} WHERE claims > 0 GROUP BY store, queue, claims
