-- The events of queues: `queue_events` without the damage, with the same columns.
SELECT * FROM {queue_events} WHERE kind <> 'Damaged'
