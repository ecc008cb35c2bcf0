-- release: hand back what a claim still owes, at the head of the list, in order.
--
-- KEYS  1 waiting (list)  2 claim (hash)  3 leases (zset)  4 commits (zset)
-- ARGV  1 claim id
-- Gives the number of tickets handed back; 0 if the claim was done, handed back or taken over before.

expect(KEYS[1], 'list')
expect(KEYS[2], 'hash')
expect(KEYS[3], 'zset')
expect(KEYS[4], 'zset')

if redis.call('ZREM', KEYS[3], ARGV[1]) == 0 then return 0 end
local payloads = {}
for _, ticket in ipairs(owed_by(KEYS[2])) do
  payloads[#payloads + 1] = ticket[2]
end
redis.call('DEL', KEYS[2])
retire(KEYS[4], ARGV[1])
push_to_head(KEYS[1], payloads)
return #payloads
