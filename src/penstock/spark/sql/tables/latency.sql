-- A row for each queue and measure. Columns: docs/formats/lake.md.
WITH samples AS (
  SELECT store, queue, 'wait' AS measure, wait_ms AS took_ms FROM {messages}
  UNION ALL
  SELECT store, queue, 'end to end', age_ms FROM {messages} WHERE state = 'deleted'
  UNION ALL
  SELECT store, queue, 'hold', hold_ms FROM {attempts}
), measured AS (
  SELECT store, queue, measure, count(*) AS samples, max(took_ms) AS max_ms,
    percentile_approx(took_ms, array(0.5, 0.9, 0.99, 0.999), 10000) AS at
  FROM samples WHERE took_ms IS NOT NULL GROUP BY store, queue, measure
)
SELECT store, queue, measure, samples, at[0] AS p50_ms, at[1] AS p90_ms, at[2] AS p99_ms,
  at[3] AS p999_ms, max_ms
FROM measured
