-- What happened in each minute.
CREATE MATERIALIZED VIEW kinds AS
SELECT date_trunc('minute', at) AS minute, kind, count(*) AS events
FROM events WHERE kind <> 'Damaged' GROUP BY ALL;

-- The largest message of each minute, from the view above it and the events.
CREATE MATERIALIZED VIEW pushes AS
SELECT minute, kinds.events AS pushed, max(body_bytes) AS largest_bytes
FROM kinds JOIN events ON date_trunc('minute', at) = minute AND events.kind = kinds.kind
WHERE kinds.kind = 'Pushed' GROUP BY ALL;
