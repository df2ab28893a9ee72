-- A row for each queue and measure. A percentile is the middle of its bin of `latencies`, whose
-- ends are 1% apart: with the rounding to whole milliseconds it is at most 1% off. Columns:
-- docs/formats/lake.md.
WITH bins AS (
  SELECT store, queue, measure, bin, CAST(sum(samples) AS bigint) AS samples, max(max_ms) AS max_ms
  FROM latencies GROUP BY store, queue, measure, bin
), summed AS (
  SELECT *,
    CAST(sum(samples) OVER (PARTITION BY store, queue, measure ORDER BY bin) AS bigint) AS up_to,
    CAST(sum(samples) OVER (PARTITION BY store, queue, measure) AS bigint) AS all_samples,
    CASE WHEN bin = 0 THEN 0
      ELSE least(max_ms, round(pow({BIN_RATIO}, bin - 0.5))) END AS middle_ms
  FROM bins
)
SELECT store, queue, measure, max(all_samples) AS samples,
  min(middle_ms) FILTER (WHERE 1000 * up_to >= 500 * all_samples) AS p50_ms,
  min(middle_ms) FILTER (WHERE 1000 * up_to >= 900 * all_samples) AS p90_ms,
  min(middle_ms) FILTER (WHERE 1000 * up_to >= 990 * all_samples) AS p99_ms,
  min(middle_ms) FILTER (WHERE 1000 * up_to >= 999 * all_samples) AS p999_ms,
  max(max_ms) AS max_ms
FROM summed GROUP BY store, queue, measure ORDER BY store, queue, measure
