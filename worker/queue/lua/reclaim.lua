-- reclaim: take back what a worker owes that let its lease run out, and count the crash.
--
-- KEYS  1 waiting (list)  2 claim (hash)  3 leases (zset)  4 attempts (hash)  5 dead (stream)  6 totals (hash)
--       7 commits (zset)
-- ARGV  1 claim id  2 crash limit  3 worker that takes back  4 its real time in ms  5 most entries of dead (0: all)
-- Gives {tickets handed back, tickets buried}; {0, 0} if the lease was renewed or taken back by another meanwhile.
--
-- A ticket is buried when it was the only one owed and had its limit of crashes: then it, and no neighbour, did it.

expect(KEYS[1], 'list')
expect(KEYS[2], 'hash')
expect(KEYS[3], 'zset')
expect(KEYS[4], 'hash')
expect(KEYS[5], 'stream')
expect(KEYS[6], 'hash')
expect(KEYS[7], 'zset')

local deadline = redis.call('ZSCORE', KEYS[3], ARGV[1])
if not deadline or tonumber(deadline) >= now_ms() then return {0, 0} end

local owed, payloads = owed_by(KEYS[2]), {}
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('DEL', KEYS[2])
retire(KEYS[7], ARGV[1])
for _, ticket in ipairs(owed) do
  local payload = ticket[2]
  local digest = redis.sha1hex(payload)
  local crashes = redis.call('HINCRBY', KEYS[4], digest, 1)
  if #owed == 1 and crashes >= tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[4], counters_of(payload))
    append(KEYS[5], ARGV[5], {'payload', payload, 'reason', 'crashed', 'detail',
      'the worker ended without a word each time it had this ticket', 'attempts', crashes, 'at_ms', ARGV[4],
      'worker', ARGV[3]})
    redis.call('HINCRBY', KEYS[6], 'dead', 1)
  else
    payloads[#payloads + 1] = payload
  end
end
push_to_head(KEYS[1], payloads)
redis.call('HINCRBY', KEYS[6], 'reclaimed', #payloads)
return {#payloads, #owed - #payloads}
