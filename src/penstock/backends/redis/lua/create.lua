#!lua
-- Creates a queue, unless it exists. Key: meta, as in queue.lua.
--
-- ARGV from 4 on: the fields of meta and their values, in turn. Reply: 1 if it was created, 0 if it
-- existed already.

if call('EXISTS', META) == 1 then return 0 end
local fields = {}
for place = 4, #ARGV do fields[place - 3] = ARGV[place] end
call('HSET', META, unpack(fields))
local at = ARGV[1] == '' and redis_ms() or tonumber(ARGV[1])
call('HSET', META, 'created_at_ms', digits(at), 'configured_at_ms', digits(at), 'last', digits(at),
  'offset', 0, 'next', 1, 'bytes', 0, 'version', 1, 'due', 0)
return 1
