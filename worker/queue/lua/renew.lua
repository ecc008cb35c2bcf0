-- renew: prolong the leases that are still held, and say that the worker lives.
--
-- KEYS  1 leases (zset)  2 workers (zset)  3 worker states (hash)
-- ARGV  1 lease in ms  2 worker  3 its state as JSON  4.. claim ids
-- Gives one number a claim id: 1 renewed, 0 no longer held.

local FORGET_AFTER_MS = 24 * 3600 * 1000

expect(KEYS[1], 'zset')
expect(KEYS[2], 'zset')
expect(KEYS[3], 'hash')

local now, reply = now_ms(), {}
for i = 4, #ARGV do
  local held = redis.call('ZSCORE', KEYS[1], ARGV[i])
  if held then set_score(KEYS[1], now + tonumber(ARGV[1]), ARGV[i]) end
  reply[#reply + 1] = held and 1 or 0
end

redis.call('HDEL', KEYS[3], ARGV[2])
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
set_score(KEYS[2], now, ARGV[2])
local gone = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - FORGET_AFTER_MS, 'LIMIT', 0, 100)
for _, worker in ipairs(gone) do
  redis.call('HDEL', KEYS[3], worker)
  redis.call('ZREM', KEYS[2], worker)
end
return reply
