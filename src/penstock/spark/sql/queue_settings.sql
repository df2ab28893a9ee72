-- A row for each queue that an event of queues names; columns as in `queues`.
SELECT store, shard, queue AS queue_number, max(name) AS queue,
  coalesce(min(if(kind = 'QueueCreated', at_ms, NULL)),
    min(CAST(get_json_object(extra, '$.created_at_ms') AS bigint))) AS created_at_ms,
  max(if(kind = 'QueueRemoved', at_ms, NULL)) AS removed_at_ms,
  max_by(extra, if(extra IS NOT NULL, sequence, NULL)) AS extra,
  CAST(max(get_json_object(extra, '$.settings.dedup_per_group')) AS boolean) AS dedup_per_group,
  count_if(kind = 'QueueConfigured') AS configured,
  sort_array(collect_list(if(kind IN ('QueuePurged', 'QueueRemoved'), named_struct(
    'sequence', sequence, 'at_ms', at_ms, 'kind', kind, 'before', before), NULL))) AS ends
FROM queue_events WHERE kind <> 'Damaged' GROUP BY store, shard, queue
