#!lua flags=allow-oom
-- Puts visible messages into the outbox, for a named queue or for the queues they came from. Keys: as
-- in queue.lua.
--
-- ARGV 4: limit; 5: the queue they go to, or ""; from 6 on: the sources to which messages may go back,
-- each a name, \0 and a queue number; or "?" alone, to list the sources.
-- Reply: queue number, time, owed, how many were moved, how many were examined and stay; or for "?"
-- the sources of the messages that would be moved.

local KEPT_MAX = 10000

if not open() then return false end
settle()
local limit, to, lists_only = tonumber(ARGV[4]), ARGV[5], ARGV[6] == '?'
local back, sources = {}, {}
for place = 6, #ARGV do back[ARGV[place]] = string.match(ARGV[place], '^[^%z]*') end
local moved, kept = 0, 0
local results = {q.identity, digits(now), 0}

local function source_of(payload)
  local _, _, _, _, group_bytes, source_bytes, at = unpack_bytes(HEADER, payload)
  at = at + group_bytes
  return sub(payload, at, at + source_bytes - 1)
end

-- Moves a message; with "?", lists its source instead.
local function move_or_list(number)
  local payload = call('HGET', MESSAGES, number)
  local text = call('HGET', STATE, number)
  local s = text and read_state(text) or new_state(payload)
  local source = source_of(payload)
  if lists_only then
    if source ~= '' then sources[source] = true end
    moved = moved + 1
    return
  end
  local target = to ~= '' and to or back[source]
  if not target then
    kept = kept + 1
    return
  end
  leave_order(number, s)
  depart(number, s, target, false)
  moved = moved + 1
end

-- Some visible messages of a set, without the first `stay`: the list, and its first index.
local function read_some(key, top, stay)
  return {
    list = call('ZRANGEBYSCORE', key, '-inf', top, 'WITHSCORES', 'LIMIT', stay, CHUNK), at = 1,
    stay = stay,
  }
end

-- Moves or lists the visible messages of two sets, in order; returns false if there are no more.
local function examine_visible(plain, grouped)
  plain = read_some(QUEUED, '(' .. digits(DELAYED), plain.stay)
  grouped = read_some(GROUPED, '+inf', grouped.stay)
  local plain_cut, grouped_cut = #plain.list == 2 * CHUNK, #grouped.list == 2 * CHUNK
  while moved < limit and kept < KEPT_MAX do
    local one, other = tonumber(plain.list[plain.at + 1]), tonumber(grouped.list[grouped.at + 1])
    if not one and not other then break end
    -- After the end of a list that was cut off by its limit, the order is not known.
    if (plain_cut and not one) or (grouped_cut and not other) then break end
    local next_of = (not other or (one and one < other)) and plain or grouped
    local before = moved
    move_or_list(next_of.list[next_of.at])
    next_of.at = next_of.at + 2
    if lists_only or moved == before then next_of.stay = next_of.stay + 1 end
  end
  return plain_cut or grouped_cut, plain, grouped
end

-- FIFO: the same for the open groups, in the order of pulls, each up to the first that stays. The
-- list of groups is written again only when the script ends.
local function examine_groups()
  local at, heads = 0, nil
  repeat
    heads = call('ZRANGE', HEADS, at, at + CHUNK - 1)
    at = at + CHUNK
    for _, head in ipairs(heads) do
      if moved >= limit or kept >= KEPT_MAX then return end
      for _, member in ipairs(first_of(sub(head, 13), limit - moved)) do
        local number, before = number_in(member), moved
        if not call('ZSCORE', GROUPED, number) then break end
        move_or_list(number)
        if moved == before then break end
      end
    end
  until #heads < CHUNK
end

if q.fifo then examine_groups() end
local may_have_more, plain, grouped = not q.fifo, {stay = 0}, {stay = 0}
while may_have_more and moved < limit and kept < KEPT_MAX do
  may_have_more, plain, grouped = examine_visible(plain, grouped)
end
results[3] = close()
if lists_only then
  for source in pairs(sources) do results[#results + 1] = source end
else
  results[4], results[5] = moved, kept
end
return results
