-- push: append all payloads, or none of them where they would take the queue past its cap.
--
-- KEYS[1]   list  tickets waiting, oldest at the head; written at the tail
-- ARGV[1]         the cap in tickets, or "" for none
-- ARGV[2..]       payloads
--
-- Returns {payloads pushed, tickets waiting afterwards}. Not safe to repeat: a second run pushes a second time.

local ARGS_AT_ONCE = 5000 -- unpack fails at about 8,000

local depth = redis.call("LLEN", KEYS[1])
local count = #ARGV - 1
if ARGV[1] ~= "" and depth + count > tonumber(ARGV[1]) then
  return { 0, depth }
end
for first = 2, #ARGV, ARGS_AT_ONCE do
  local last = math.min(first + ARGS_AT_ONCE - 1, #ARGV)
  depth = redis.call("RPUSH", KEYS[1], unpack(ARGV, first, last))
end
return { count, depth }
