-- Deaths that no answer to a verdict reports: the answer to a claim does.

-- Return the deaths that this script has caused, each with the id from the sender, or an empty one.
local function deaths(base)
    local named = {}
    for i, head in ipairs(#new_deaths > 0 and fetch('HMGET', base .. 'head', new_deaths) or {}) do
        named[i] = new_deaths[i] .. '|' .. death_causes[i] .. '|' .. (id_in(head) or '')
    end
    return named
end

-- Keep them for the next claim: the answer of this script reports none.
local function keep_deaths(base)
    if #new_deaths > 0 then
        many('RPUSH', base .. 'untold', deaths(base))
        redis.call('LTRIM', base .. 'untold', -DEATHS_MAX, -1)
        redis.call('EXPIRE', base .. 'untold', 86400)
    end
end

-- Return them, and a part of the kept ones. They are stored with the claim, so that they can be reported again if its
-- answer is lost; and only then forgotten, so that a script that fails here loses none.
local function take_deaths(base, lane, mark, lock)
    local named = deaths(base)
    local is_any = redis.call('LLEN', base .. 'untold') > 0
    local kept = is_any and redis.call('LRANGE', base .. 'untold', 0, WORK - 1) or {}
    for _, one in ipairs(kept) do
        named[#named + 1] = one
    end
    if #named > 0 then
        redis.call('SET', base .. 'named:' .. lane, json().encode({mark, named}), 'PX', lock)
    end
    if #kept > 0 then
        redis.call('LPOP', base .. 'untold', #kept)
    end
    return named
end
