-- Deaths that no verdict's answer names: a claim does.

-- Name what this script has buried, each with its id, or none if that was made up.
local function deaths(base)
    local named = {}
    for i, head in ipairs(#buried > 0 and fetch('HMGET', base .. 'head', buried) or {}) do
        local id = head and cjson.decode(head)[1]
        named[i] = buried[i] .. '|' .. causes[i] .. '|' .. (type(id) == 'string' and id or '')
    end
    return named
end

-- Keep those for the next claim: the answer of this script names none.
local function keep_deaths(base)
    if #buried > 0 then
        many('RPUSH', base .. 'untold', deaths(base))
        redis.call('LTRIM', base .. 'untold', -UNTOLD, -1)
        redis.call('EXPIRE', base .. 'untold', 86400)
    end
end

-- Name them, and of those that were kept a part; note what is named, so that it can be named again if that is lost.
local function told_deaths(base, lane, mark, lock)
    local named = deaths(base)
    for _, one in ipairs(redis.call('LPOP', base .. 'untold', WORK) or {}) do
        named[#named + 1] = one
    end
    if #named > 0 then
        redis.call('SET', base .. 'named:' .. lane, cjson.encode({mark, named}), 'PX', lock)
    end
    return named
end
