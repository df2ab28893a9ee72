#!lua
-- Adds messages. Keys: as in queue.lua.
--
-- ARGV from 4 on: each a message: size, priority, delay_ms and ttl_ms (-1: the queue's own), the
-- lengths of group and dedup id, then group, dedup id and content.
-- Reply: queue number, time, owed, then for each message its NUMBER, minus the NUMBER that an
-- earlier push made, or why it was refused.

local ITEM = '>I4BddI2I2'

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

-- Gives the message its place; plain ones are added all at once at the end.
local function place(number, size, priority, delay_ms, expires, group)
  arrivals[#arrivals + 1] = digits(now)
  arrivals[#arrivals + 1] = number
  if expires > 0 then call('ZADD', EXPIRIES, expires, number) end
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
  elseif group then
    join_order(number, s)
  else
    queued[#queued + 1] = score_of(priority, number)
    queued[#queued + 1] = number
  end
end

local function add(item)
  local size, priority, delay_ms, ttl_ms, group_bytes, dedup_bytes, at = unpack_bytes(ITEM, item)
  local group = group_bytes > 0 and sub(item, at, at + group_bytes - 1) or nil
  at = at + group_bytes
  local dedup = dedup_bytes > 0 and sub(item, at, at + dedup_bytes - 1) or nil
  local refused = refusal(size, priority, group, dedup)
  if refused then return refused end
  if dedup then
    if per_group then dedup = group .. '\0' .. dedup end
    local earlier = remembered(DEDUPS, dedup, DEDUP_WINDOW_MS)
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
  contents[#contents + 1] = number
  contents[#contents + 1] = pack(HEADER, now, expires, size, priority, group_bytes, 0)
    .. (group or '') .. sub(item, at + dedup_bytes)
  if dedup then
    remember(DEDUPS, DEDUP_ORDER, dedup, number, DEDUP_WINDOW_MS, DEDUPS_MAX)
  end
  place(number, size, priority, delay_ms < 0 and delay_default or delay_ms, expires, group)
  note('Pushed', number)
  return q.next - 1
end

for place_in = 4, #ARGV do results[place_in] = add(ARGV[place_in]) end
call_many('HSET', MESSAGES, contents)
call_many('ZADD', QUEUED, queued)
call_many('ZADD', ARRIVALS, arrivals)
results[3] = close()
return results
