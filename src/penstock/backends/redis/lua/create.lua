#!lua
-- Creates a queue, unless it exists. Key: meta, as in queue.lua.
--
-- ARGV from 4 on: the fields of meta and their values, in turn; the first is the number. Reply: 1 if
-- it was created, 0 if it existed already.

if call('EXISTS', META) == 1 then return 0 end
local fields = {}
for place = 4, #ARGV do fields[place - 3] = ARGV[place] end
call('HSET', META, unpack(fields))
now = ARGV[1] == '' and redis_ms() or tonumber(ARGV[1])
call('HSET', META, 'created_at_ms', digits(now), 'configured_at_ms', digits(now), 'version', 1)
q.next, q.bytes, q.offset, q.due, q.identity = 1, 0, 0, 0, ARGV[5] .. ':1'
keep_counters(false)
return 1
