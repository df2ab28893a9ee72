-- A row for each queue, measure, hour and bin. Columns: docs/formats/lake.md.
SELECT store, queue, what AS measure, at AS hour, bin, sum(samples) AS samples, max(max_ms) AS max_ms
FROM sums JOIN queues USING (store, shard, queue_number)
WHERE what IN ('wait', 'hold', 'end to end') GROUP BY store, queue, what, at, bin
