-- A row for each queue, measure, hour and bin: a histogram of the samples of a part. Histograms of
-- parts, hours and queues merge by adding their samples.
--
--   store, queue  which queue
--   measure       wait, hold or end to end
--   hour          since 1970, in which the measured time ended
--   bin           0 for less than a millisecond; n for 1.01^(n-1) ms and more, but less than 1.01^n
--   samples       how many there are
--   max_ms        the greatest of them
WITH samples AS (
  SELECT part_number, queue_number, 'wait' AS measure, first_pulled_at_ms AS at_ms,
    first_pulled_at_ms - greatest(pushed_at_ms, coalesce(visible_at_ms, 0)) AS took_ms
  FROM lives
  UNION ALL
  SELECT part_number, queue_number, 'end to end', ended_at_ms, ended_at_ms - pushed_at_ms
  FROM lives WHERE state = 'deleted'
  UNION ALL
  SELECT part_number, queue_number, 'hold', ended_at_ms, ended_at_ms - started_at_ms FROM claims
), counted AS (
  SELECT part_number, queue_number, measure, at_ms // {HOUR_MS} AS hour,
    CASE WHEN took_ms < 1 THEN 0 ELSE 1 + CAST(floor(ln(took_ms) / ln({BIN_RATIO})) AS int) END
      AS bin,
    count(*) AS samples, max(took_ms) AS max_ms
  FROM samples WHERE took_ms IS NOT NULL GROUP BY ALL
)
SELECT part.store, part_number, coalesce(queue, concat('#', counted.queue_number)) AS queue,
  measure, hour, bin, sum(samples) AS samples, max(max_ms) AS max_ms
FROM counted LEFT JOIN queue_names ON queue_names.queue_number = counted.queue_number, part
GROUP BY ALL ORDER BY measure, queue, hour, bin
