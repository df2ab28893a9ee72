#!lua
-- Adds messages that come from another queue. Keys: as in queue.lua.
--
-- ARGV 4: 1 if they are for a FIFO queue; from 5 on: each a message: size, priority, epoch, first
-- claimed, the lengths of group, source and identity, then those three and the content. One with an
-- identity that arrived before is not added again.
-- Reply: queue number, time, owed, 1; or 0 if the queue is of the other kind.

local ITEM = '>I4BI4dI2I2I2'

if not open() then return false end
if q.fifo ~= (ARGV[4] == '1') then return {q.identity, digits(now), 0, 0} end
settle()
for place = 5, #ARGV do
  local item = ARGV[place]
  local size, priority, epoch, first, group_bytes, source_bytes, identity_bytes, at = unpack_bytes(ITEM, item)
  local group = group_bytes > 0 and sub(item, at, at + group_bytes - 1) or nil
  local source = sub(item, at + group_bytes, at + group_bytes + source_bytes - 1)
  at = at + group_bytes + source_bytes
  local identity = '\0' .. sub(item, at, at + identity_bytes - 1)
  if not find_id(DEDUPS, identity, DEDUP_WINDOW_MS) then
    local number = digits(q.next)
    q.next = q.next + 1
    q.bytes = q.bytes + size
    store_id(DEDUPS, DEDUP_ORDER, identity, number, DEDUP_WINDOW_MS, DEDUPS_MAX)
    call('HSET', MESSAGES, number, pack(HEADER, now, 0, size, priority, group_bytes, source_bytes)
      .. (group or '') .. source .. sub(item, at + identity_bytes))
    call('ZADD', ARRIVALS, now, number)
    note_due(now + q.retention_ms)
    local s = {
      epoch = epoch, arrival_epoch = epoch, size = size, first = first, back = 0, arrived = now,
      expires = 0, priority = priority, kept = 0, group = group,
    }
    keep_state(number, s)
    if q.fifo then call('ZADD', LINES, 0, line_member(group, number)) end
    join_order(number, s)
    note('Arrived', number, epoch, sub(identity, 2))
  end
end
return {q.identity, digits(now), close(), 1}
