-- Hints: wake those who listen to a queue.

-- Wake those who listen to *channel*, at most once in QUIET ms, or longer if they are many: whatever is done meanwhile
-- wakes nobody. So they are told for how long that is, and look again when it is over. Nothing is missed.
local function wake(channel)
    if redis.call('SET', channel .. ':quiet', '', 'NX', 'PX', QUIET) then
        local heard = redis.pcall('PUBSUB', 'NUMSUB', channel)
        local quiet = math.max(QUIET, math.min(QUIET_MAX, math.floor((tonumber(heard[2]) or 0) / 4)))
        if quiet > QUIET then
            redis.call('PEXPIRE', channel .. ':quiet', quiet)
        end
        redis.pcall('PUBLISH', channel, quiet)
    end
end

local function ring(base, is_dead)
    wake(base .. (is_dead and 'dead' or 'live'))
end
