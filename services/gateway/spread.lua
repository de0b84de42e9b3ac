-- Takes from users' buckets what was used, and says who is over its rate. A bucket is the time in µs at which it will be
-- full again. It may be taken from when it is empty, but its debt is never more than one burst.
--
-- KEYS: a hash per user. ARGV: how many kinds; for each its name, its rate per s and its burst; then for each user how
-- many of each kind.
-- Returns the JSON of [[number of the user, number of the kind, ms until one may be done], …], or '' if nobody is over.
local kinds = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local over = {}

local function take(user, key)
    local first = 1 + 3 * kinds + (user - 1) * kinds
    local lasts = 0
    for kind = 1, kinds do
        local used = tonumber(ARGV[first + kind])
        if used > 0 then
            local name, rate = ARGV[3 * kind - 1], tonumber(ARGV[3 * kind])
            local burst = tonumber(ARGV[3 * kind + 1]) / rate * 1000000
            local full = math.max(tonumber(redis.call('HGET', key, name)) or now, now) + used / rate * 1000000
            full = math.min(full, now + 2 * burst)
            redis.call('HSET', key, name, string.format('%.0f', full))
            lasts = math.max(lasts, full - now)
            local wait = full + 1000000 / rate - burst - now
            if wait > 0 then
                table.insert(over, {user, kind, math.ceil(wait / 1000)})
            end
        end
    end
    if lasts > 0 and redis.call('PTTL', key) < lasts / 1000 then
        redis.call('PEXPIRE', key, math.ceil(lasts / 1000) + 1000)
    end
end

for n, key in ipairs(KEYS) do
    take(n, key)
end
return #over > 0 and cjson.encode(over) or ''
