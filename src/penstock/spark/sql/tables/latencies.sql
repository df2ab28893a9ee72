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
  SELECT queue, 'wait' AS measure, first_pulled_at_ms AS at_ms, wait_ms AS took_ms FROM messages
  UNION ALL
  SELECT queue, 'end to end', ended_at_ms, age_ms FROM messages WHERE state = 'deleted'
  UNION ALL
  SELECT queue, 'hold', ended_at_ms, hold_ms FROM attempts
)
SELECT part.store, queue, measure, at_ms // {HOUR_MS} AS hour,
  CASE WHEN took_ms < 1 THEN 0 ELSE 1 + CAST(floor(ln(took_ms) / ln({BIN_RATIO})) AS int) END
    AS bin,
  count(*) AS samples, max(took_ms) AS max_ms
FROM samples, part WHERE took_ms IS NOT NULL GROUP BY ALL ORDER BY measure, queue, hour, bin
