-- A row for each store, from the balances of all parts and the events of queues.
--
--   store                    its identity
--   first_entry, last_entry  of its journal; null if nothing in it could be read
--   entries                  how many entries there are in between
--   events                   how many events, and damaged ranges
WITH counted AS (
  SELECT store, first_entry, last_entry, entries, events FROM balances
  UNION ALL
  SELECT store, if(entry > 0, entry, NULL), entry,
    CAST(kind <> 'Damaged' AND sequence % {ENTRY_SPAN} = 0 AS int), 1 FROM queue_events
)
SELECT store, min(first_entry) AS first_entry, max(last_entry) AS last_entry,
  sum(entries) AS entries, sum(events) AS events
FROM counted GROUP BY store
