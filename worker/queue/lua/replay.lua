-- replay: put dead letters back at the tail of the list, and take them off the dead stream.
--
-- KEYS  1 dead (stream)  2 waiting (list)  3 attempts (hash)
-- ARGV  1 most tickets that may wait afterwards (0: any number)  2.. ids of dead letters, oldest first
-- Gives {put back, gone, without a payload, refused by ARGV 1}: every id counts in one of the four.
--
-- A letter that is gone from the stream was put back or dropped before and is not pushed again, so a lost reply is safe
-- to repeat.
--
-- Each letter is pushed before anything of it is removed, unlike in the other verbs, which work a full Redis off. The
-- memory check is made at the first write alone, and a removal always passes it: removing first would put work on a
-- server that refuses every other producer. As it is, the push is refused and nothing has changed. And whatever else may
-- end a script halfway (a user who may push but not XDEL), a letter is then in both places at worst, never in neither.

expect(KEYS[1], 'stream')
expect(KEYS[2], 'list')
expect(KEYS[3], 'hash')

local function payload_of(entry)
  local payload
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 'payload' then payload = entry[2][i + 1] end
  end
  return payload
end

local most, depth = tonumber(ARGV[1]), redis.call('LLEN', KEYS[2])
local put_back, gone, without_payload, refused = 0, 0, 0, 0
for i = 2, #ARGV do
  local entry = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  local payload = entry and payload_of(entry)
  if not entry then
    gone = gone + 1
  elseif not payload then
    without_payload = without_payload + 1
  elseif most > 0 and depth >= most then
    refused = refused + 1
  else
    depth = redis.call('RPUSH', KEYS[2], payload)
    -- Its crashes and errors begin anew: with the old counts the next one might bury it again at once.
    redis.call('HDEL', KEYS[3], counters_of(payload))
    redis.call('XDEL', KEYS[1], ARGV[i])
    put_back = put_back + 1
  end
end
return {put_back, gone, without_payload, refused}
