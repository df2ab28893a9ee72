#!lua
-- Adds messages. Keys: as in queue.lua.
--
-- ARGV 4: messages one after another: size, priority, delay_ms and ttl_ms (-1: the queue's own), the
-- lengths of group, dedup id and content, then these three.
-- Reply: queue number, time, owed, then for each message its NUMBER, minus the NUMBER that an
-- earlier push made, or why it was refused.

local ITEM = '>I4BddI2I2I4'

if not open() then return false end
settle()
local m = call('HMGET', META, 'delay_ms', 'body_bytes_max', 'messages_max', 'bytes_max',
  'dedup_by_content', 'dedup_per_group')
local delay_default, body_max = tonumber(m[1]), tonumber(m[2])
local messages_max, bytes_max = tonumber(m[3]), tonumber(m[4])
local by_content, per_group = m[5] == '1', m[6] == '1'
local count = messages_max and call('HLEN', MESSAGES) - call('ZCARD', OWED) or 0
local results = {q.identity, digits(now), 0}
local contents, queued, arrivals = {}, {}, {}
local now_digits = digits(now)

local function refusal(size, priority, group, dedup)
  if size > body_max then return 'large:' .. size .. ':' .. body_max end
  if q.fifo and not group then return 'group' end
  if q.fifo and priority > 0 then return 'priority' end
  if by_content and not dedup then return 'content' end
end

local function no_room(size)
  if messages_max and count >= messages_max then return 'messages:' .. count .. ':' .. messages_max end
  if bytes_max and q.bytes + size > bytes_max then
    return 'bytes:' .. digits(q.bytes) .. ':' .. digits(bytes_max)
  end
end

-- Gives a message its place that has a group or is delayed.
local function place(number, size, priority, delay_ms, expires, group)
  local s = {
    epoch = 0, arrival_epoch = 0, size = size, first = 0, back = 0, arrived = now, expires = expires,
    priority = priority, kept = 0, group = group,
  }
  if q.fifo then
    call('ZADD', LINES, 0, line_member(group, number))
    touched[group] = true
  end
  if delay_ms > 0 then
    keep_state(number, s)
    hide(number, now + delay_ms)
  else
    join_order(number, s)
  end
end

local items, at = ARGV[4], 1

-- Adds the message at this place of the items, and goes on to the next.
local function add()
  local size, priority, delay_ms, ttl_ms, group_bytes, dedup_bytes, content_bytes, from =
    unpack_bytes(ITEM, items, at)
  at = from + group_bytes + dedup_bytes + content_bytes
  local group = group_bytes > 0 and sub(items, from, from + group_bytes - 1) or nil
  from = from + group_bytes
  local dedup = dedup_bytes > 0 and sub(items, from, from + dedup_bytes - 1) or nil
  local refused = refusal(size, priority, group, dedup)
  if refused then return refused end
  if dedup then
    if per_group then dedup = group .. '\0' .. dedup end
    local earlier = find_id(DEDUPS, dedup, DEDUP_WINDOW_MS)
    if earlier then return -tonumber(earlier) end
  end
  if messages_max or bytes_max then
    refused = no_room(size)
    if refused then return refused end
  end
  local number = digits(q.next)
  q.next = q.next + 1
  q.bytes = q.bytes + size
  count = count + 1
  local expires = ttl_ms < 0 and 0 or now + ttl_ms
  local header = pack(HEADER, now, expires, size, priority, group_bytes, 0)
  local last = #contents
  contents[last + 1] = number
  contents[last + 2] = (group and header .. group or header) .. sub(items, from + dedup_bytes, at - 1)
  arrivals[last + 1], arrivals[last + 2] = now_digits, number
  if expires > 0 then
    call('ZADD', EXPIRIES, expires, number)
    note_due(expires)
  end
  if dedup then
    store_id(DEDUPS, DEDUP_ORDER, dedup, number, DEDUP_WINDOW_MS, DEDUPS_MAX)
  end
  if delay_ms < 0 then delay_ms = delay_default end
  if group or delay_ms > 0 then
    place(number, size, priority, delay_ms, expires, group)
  else
    last = #queued
    queued[last + 1], queued[last + 2] = (9 - priority) * BAND + q.next - 1, number
  end
  if history_max > 0 then note('Pushed', number) end
  return q.next - 1
end

while at <= #items do results[#results + 1] = add() end
call_many('HSET', MESSAGES, contents)
call_many('ZADD', QUEUED, queued)
call_many('ZADD', ARRIVALS, arrivals)
if #arrivals > 0 then note_due(now + q.retention_ms) end
results[3] = close()
return results
