-- A row for each queue and measure. A percentile is the middle of its bin of `latencies`, whose ends
-- are 1% apart: with the rounding to whole milliseconds it is at most 1% off. Columns:
-- docs/formats/lake.md.
WITH bins AS (
  SELECT store, queue, what AS measure, bin, sum(samples) AS samples, max(max_ms) AS max_ms
  FROM sums JOIN queues USING (store, shard, queue_number)
  WHERE what IN ('wait', 'hold', 'end to end') GROUP BY store, queue, what, bin
), summed AS (
  SELECT *, sum(samples) OVER (PARTITION BY store, queue, measure ORDER BY bin) AS up_to,
    sum(samples) OVER (PARTITION BY store, queue, measure) AS all_samples,
    if(bin = 0, 0, least(max_ms, round(pow({BIN_RATIO}, bin - 0.5D)))) AS middle_ms
  FROM bins
)
SELECT store, queue, measure, max(all_samples) AS samples,
  min(if(1000 * up_to >= 500 * all_samples, middle_ms, NULL)) AS p50_ms,
  min(if(1000 * up_to >= 900 * all_samples, middle_ms, NULL)) AS p90_ms,
  min(if(1000 * up_to >= 990 * all_samples, middle_ms, NULL)) AS p99_ms,
  min(if(1000 * up_to >= 999 * all_samples, middle_ms, NULL)) AS p999_ms,
  max(max_ms) AS max_ms
FROM summed GROUP BY store, queue, measure
