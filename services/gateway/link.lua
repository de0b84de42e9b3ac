-- The sign of this store: made when it is missing, as after a FLUSHALL, and written each time, so that a store that
-- takes no writes is seen as away. It is the store's time in µs at which it was made.
-- KEYS: the sign. Returns it.
local epoch = redis.call('GET', KEYS[1])
if not epoch then
    local time = redis.call('TIME')
    epoch = time[1] .. string.format('%06d', time[2])
end
redis.call('SET', KEYS[1], epoch)
return epoch
