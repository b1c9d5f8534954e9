-- Schedules.

-- name: schedules
return {NOW, redis.call('HGETALL', KEYS[1] .. 'schedules')}

-- name: advance (schedule, what is expected, what to keep, ms; for each message, the arguments of keep)
-- An empty text stands for nothing. Returns whether it was done, what is kept, the time, and the
-- same as send about the queue.
local base, schedule, expected, record = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local kept = redis.call('HGET', base .. 'schedules', schedule) or ''
if kept ~= expected or NOW < tonumber(ARGV[4]) then
    return {0, kept, NOW, 0, made}
end
local refused = #ARGV > 4 and refusal_to_send(base)
if refused then
    return refused
end
if record == '' then
    redis.call('HDEL', base .. 'schedules', schedule)
else
    redis.call('HSET', base .. 'schedules', schedule, record)
end
for i = 5, #ARGV, 4 do
    keep(base, ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3])
end
if #ARGV > 4 then
    notify(base, false)
end
return {1, record, NOW, is_new and 1 or 0, made}
