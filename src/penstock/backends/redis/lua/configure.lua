#!lua
-- Changes the settings of a queue. Keys: as in queue.lua.
--
-- ARGV 4: the queue number (with its version) that the change was made from; 5: 1 if this counts as
-- configuring; from 6 on: fields of meta and their values. Reply: queue number, time, owed, then 1 if
-- it was changed, 0 if the queue was changed meanwhile.

if not open() then return false end
settle()
local results = {q.identity, digits(now), 0, 0}
if q.identity == ARGV[4] then
  local fields = {}
  for place = 6, #ARGV do fields[place - 5] = ARGV[place] end
  call('HSET', META, unpack(fields))
  call('HINCRBY', META, 'version', 1)
  if ARGV[5] == '1' then call('HSET', META, 'configured_at_ms', digits(now)) end
  -- With a longer retention, some that were overdue may not be.
  local overdue = call('ZPOPMIN', OVERDUE, CHUNK)
  while #overdue > 0 do
    for place = 1, #overdue, 2 do call('ZADD', ARRIVALS, overdue[place + 1], overdue[place]) end
    overdue = call('ZPOPMIN', OVERDUE, CHUNK)
  end
  keep_counters(true)
  open()
  settle_due(SETTLE_MAX)
  results[1], results[4] = q.identity, 1
end
results[3] = close()
return results
