-- A row for each queue that any event names. Columns: docs/formats/lake.md.
WITH changes AS (
  SELECT store, shard, queue AS queue_number,
    max(name) AS queue,
    min(at_ms) FILTER (WHERE kind = 'QueueCreated') AS created_at_ms,
    max(at_ms) FILTER (WHERE kind = 'QueueRemoved') AS removed_at_ms,
    max_by(extra, sequence) FILTER (WHERE extra IS NOT NULL) AS extra,
    max(get_json_object(extra, '$.settings.dedup_per_group')) AS dedup_per_group,
    count_if(kind = 'QueueConfigured') AS configured,
    array_sort(collect_list(struct(sequence, at_ms, kind, before))
      FILTER (WHERE kind IN ('QueuePurged', 'QueueRemoved'))) AS ends
  FROM {events}
  WHERE message IS NULL AND kind <> 'Damaged'
  GROUP BY store, shard, queue
), known AS (
  SELECT DISTINCT store, shard, queue AS queue_number FROM {events} WHERE kind <> 'Damaged'
  UNION
  SELECT DISTINCT store, shard, to_queue FROM {events} WHERE to_queue IS NOT NULL
)
SELECT store, shard, queue_number,
  coalesce(queue, concat('#', queue_number)) AS queue, created_at_ms, removed_at_ms,
  boolean(get_json_object(extra, '$.settings.fifo')) AS fifo,
  boolean(dedup_per_group) AS dedup_per_group,
  bigint(get_json_object(extra, '$.settings.visibility_ms')) AS visibility_ms,
  bigint(get_json_object(extra, '$.settings.retention_ms')) AS retention_ms,
  get_json_object(extra, '$.settings.dead_letter') AS dead_letter,
  bigint(get_json_object(extra, '$.settings.max_receives')) AS max_receives,
  coalesce(configured, 0) AS configured,
  coalesce(ends, array()) AS ends
FROM known LEFT JOIN changes USING (store, shard, queue_number)
