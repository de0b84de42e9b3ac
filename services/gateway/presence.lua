-- What a gateway says of its own users' sessions. Decides, user by user, whether the user came online or its last session
-- is gone, and publishes that as one message: the JSON of [time in µs, [[user, 1 online | 2 leaving, since in µs], …]].
--
-- KEYS: per user the sorted set of its sessions, by their ends in s, and the hash of its state: on: since when it is
-- online; seen: when somebody last said so, or its last session was closed; told: 1 if all were told that it is online.
-- ARGV: the channel; s that a session stays without being said again; µs that a user without a session still counts as
-- online; s that a state is kept; then per user: its id, since when it is online as far as the gateway remembers (µs, or
-- empty), how many sessions are here and which, how many ended and which.
-- Returns the JSON of a list with, for each user, since when it is online in µs, or '' if it is not.
local channel, stays, grace, keep = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now_s = now / 1000000
local changes, answers = {}, {}
local at = 5

local function text(us)
    return string.format('%.0f', us)
end

local function take(count)
    local taken = {}
    for n = 1, count do
        taken[n] = ARGV[at + n - 1]
    end
    at = at + count
    return taken
end

local function tell(sessions, state, user, remembered, here, ended)
    redis.call('ZREMRANGEBYSCORE', sessions, '-inf', now_s)
    local before, removed = redis.call('ZCARD', sessions), 0
    for _, session in ipairs(ended) do
        removed = removed + redis.call('ZREM', sessions, session)
    end
    for _, session in ipairs(here) do
        redis.call('ZADD', sessions, now_s + stays, session)
    end
    if #here > 0 then
        redis.call('EXPIRE', sessions, math.ceil(stays) + 1)
    end
    local known = redis.call('HMGET', state, 'on', 'seen', 'told')
    local on, seen, told = tonumber(known[1]), tonumber(known[2]), known[3] == '1'
    if #here == 0 and before == removed then
        if removed > 0 then
            redis.call('HSET', state, 'seen', text(now))
            if told then
                table.insert(changes, {user, 2, ''})
            end
        end
        return ''
    end
    local still_on = told and on and (before > 0 or now < (seen or 0) + grace)
    local since = still_on and on or now
    if remembered then
        since = still_on and math.min(on, remembered) or remembered
    end
    redis.call('HSET', state, 'on', text(since), 'seen', text(now), 'told', '1')
    redis.call('EXPIRE', state, keep)
    if not told or since ~= on then
        table.insert(changes, {user, 1, text(since)})
    end
    return text(since)
end

for n = 1, #KEYS, 2 do
    local user, remembered, count = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    at = at + 3
    local here = take(count)
    count = tonumber(ARGV[at])
    at = at + 1
    table.insert(answers, tell(KEYS[n], KEYS[n + 1], user, remembered, here, take(count)))
end
if #changes > 0 then
    redis.call('PUBLISH', channel, cjson.encode({text(now), changes}))
end
return cjson.encode(answers)
