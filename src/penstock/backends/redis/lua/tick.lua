#!lua flags=allow-oom
-- Settles what is due, renews the waiters of a process, and wakes those that can be served. Keys: as
-- in queue.lua.
--
-- ARGV 4: how many of the following waiters leave; from 5 on: those, then the waiters that stay.
-- Reply: queue number, time, owed, 1 if more is due, then the waiters among them that were woken.

if not open() then return false end
settle_due(SETTLE_MAX)
local leaving, seconds = tonumber(ARGV[4]), redis_s()
for place = 5, 4 + leaving do remove_waiter(ARGV[place]) end
for _, waiter in ipairs(call('ZRANGEBYSCORE', ALIVE, '-inf', '(' .. seconds)) do remove_waiter(waiter) end
local results = {q.identity, digits(now), 0, has_more and 1 or 0}
for place = 5 + leaving, #ARGV do
  local waiter = ARGV[place]
  call('ZADD', ALIVE, seconds + ALIVE_S, waiter)
  if call('ZSCORE', WOKEN, waiter) then
    results[#results + 1] = waiter
  else
    call('ZADD', WAITERS, tonumber(sub(waiter, 1, 16)), waiter)
  end
end
results[3] = close()
return results
