-- Hints to the subscribers of a queue.

-- Publish on *channel*, at most once in QUIET ms, or more rarely if it has many subscribers. The message is the length of
-- this pause: the subscribers poll again when it is over, so they miss no change during the pause.
local function publish(channel)
    if redis.call('SET', channel .. ':quiet', '', 'NX', 'PX', QUIET) then
        local subscribers = redis.pcall('PUBSUB', 'NUMSUB', channel)
        local quiet = math.max(QUIET, math.min(QUIET_MAX, math.floor((tonumber(subscribers[2]) or 0) / 4)))
        if quiet > QUIET then
            redis.call('PEXPIRE', channel .. ':quiet', quiet)
        end
        redis.pcall('PUBLISH', channel, quiet)
    end
end

local function notify(base, is_dead)
    publish(base .. (is_dead and 'dead' or 'live'))
end
