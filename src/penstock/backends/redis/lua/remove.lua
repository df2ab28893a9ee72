#!lua flags=allow-oom
-- Removes a queue, or every message of it. Keys: as in queue.lua.
--
-- ARGV 4: "queue" or "messages". Reply: queue number, time, owed, then how many messages were removed,
-- or -1 if nothing was, because some are still owed to other queues.

if not open() then return false end
settle()
local count = call('HLEN', MESSAGES)
if call('ZCARD', OWED) > 0 then return {q.identity, digits(now), close(), -1} end
if ARGV[4] == 'queue' then
  local notified = {}
  for _, key in ipairs({WAITERS, WOKEN}) do
    for _, waiter in ipairs(call('ZRANGE', key, 0, -1)) do
      local process = process_of(waiter)
      if not notified[process] then publish_to(waiter, 'D', '') end
      notified[process] = true
    end
  end
  for first = 1, #KEYS do call('UNLINK', KEYS[first]) end
  return {q.identity, digits(now), 0, count}
end
call('UNLINK', MESSAGES, STATE, QUEUED, GROUPED, LINES, HEADS, GROUPS, UNACKED, ARRIVALS, OVERDUE, EXPIRIES)
if q.fifo then call('UNLINK', DEDUPS, DEDUP_ORDER) end
q.bytes, touched = 0, {}
return {q.identity, digits(now), close(), count}
