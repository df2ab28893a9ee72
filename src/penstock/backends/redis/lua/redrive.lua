#!lua flags=allow-oom
-- Puts visible messages into the outbox, for a named queue or for the queues they came from. Keys: as
-- in queue.lua.
--
-- ARGV 4: limit; 5: the queue they go to, or ""; from 6 on: the sources to which messages may go back,
-- each a name, \0 and a queue number; or "?" alone, to be told which sources there are.
-- Reply: queue number, time, owed, how many were moved, how many were looked at and stay; or for "?"
-- the sources of the messages that would be moved.

local KEPT_MAX = 10000

if not open() then return false end
settle()
local limit, to, asks = tonumber(ARGV[4]), ARGV[5], ARGV[6] == '?'
local back, blocked, sources = {}, {}, {}
for place = 6, #ARGV do back[ARGV[place]] = string.match(ARGV[place], '^[^%z]*') end
local moved, kept = 0, 0
local results = {q.identity, digits(now), 0}

local function source_of(payload)
  local _, _, _, _, group_bytes, source_bytes, at = unpack_bytes(HEADER, payload)
  at = at + group_bytes
  return sub(payload, at, at + source_bytes - 1)
end

local function is_blocked(s)
  if not q.fifo then return false end
  if blocked[s.group] == nil then blocked[s.group] = call('HEXISTS', GROUPS, s.group) == 0 end
  return blocked[s.group]
end

local function consider(number)
  local payload = call('HGET', MESSAGES, number)
  local text = call('HGET', STATE, number)
  local s = text and read_state(text) or new_state(payload)
  if is_blocked(s) then return end
  local source = source_of(payload)
  if asks then
    if source ~= '' then sources[source] = true end
    moved = moved + 1
    return
  end
  local target = to ~= '' and to or back[source]
  if not target then
    kept = kept + 1
    if q.fifo then blocked[s.group] = true end
    return
  end
  leave_order(number, s)
  depart(number, s, target, false)
  moved = moved + 1
end

-- The visible messages in order, from both sets, some at a time; those that stay are passed over.
local function each_of(key, top)
  local passed = 0
  while moved < limit and kept < KEPT_MAX do
    local before = call('ZCARD', key)
    local numbers = call('ZRANGEBYSCORE', key, '-inf', top, 'LIMIT', passed, math.min(CHUNK, limit))
    if #numbers == 0 then return end
    for _, number in ipairs(numbers) do
      if moved >= limit then return end
      consider(number)
    end
    passed = passed + #numbers - (before - call('ZCARD', key))
  end
end

each_of(QUEUED, '(' .. digits(DELAYED))
each_of(GROUPED, '+inf')
results[3] = close()
if asks then
  for source in pairs(sources) do results[#results + 1] = source end
else
  results[4], results[5] = moved, kept
end
return results
