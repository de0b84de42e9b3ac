-- What is known of users now. One whose sessions have all ended, and its time to come back with them, is found to be
-- offline here, by whoever asks first, and that is published as in `presence.lua`, with 0 for offline.
--
-- KEYS: the sign of this store, then per user its sessions and its state, as in `presence.lua`. ARGV: the channel; µs
-- that a user without a session still counts as online; µs that a new store is given until it has been told everything;
-- then the users.
-- Returns the JSON of [time in µs, [[1 online | 0 offline | -1 unknown, since in µs or '', s after which to ask again or
-- -1], …]].
local channel, grace, settle = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local settled = (tonumber(redis.call('GET', KEYS[1])) or now) + settle
local changes, answers = {}, {}

local function text(us)
    return us and string.format('%.0f', us) or ''
end

local function ask(sessions, state, user)
    local ends = tonumber(redis.call('ZREVRANGE', sessions, 0, 0, 'WITHSCORES')[2])
    local known = redis.call('HMGET', state, 'on', 'seen', 'told')
    local on, seen, told = tonumber(known[1]), tonumber(known[2]), known[3] == '1'
    if ends and ends * 1000000 > now then
        return {1, text(on), ends - now / 1000000}
    end
    if not seen then
        -- Nobody has said anything of this user. In a store that has just lost all, that does not mean much.
        if now < settled then
            return {-1, '', (settled - now) / 1000000}
        end
        return {0, '', -1}
    end
    if told and now < seen + grace then
        return {1, text(on), (seen + grace - now) / 1000000}
    end
    if told then
        redis.call('HSET', state, 'told', '0')
        table.insert(changes, {user, 0, text(seen)})
    end
    return {0, text(seen), -1}
end

for n = 2, #KEYS, 2 do
    table.insert(answers, ask(KEYS[n], KEYS[n + 1], ARGV[n / 2 + 3]))
end
if #changes > 0 then
    redis.call('PUBLISH', channel, cjson.encode({text(now), changes}))
end
return cjson.encode({text(now), answers})
