-- A message's row in the hash "state", and the settings of its queue.

local function read(text)
    local count, sent, priority, expires, place, token, session =
        string.match(text, '^(%d+)|(%d+)|(%d)|(%d+)|(%a)|([^|]*)|(.*)$')
    return {
        count = tonumber(count), sent = sent, priority = tonumber(priority), expires = tonumber(expires),
        place = place, token = token, session = session ~= '' and session or nil,
    }
end

local function text_of(row)
    return row.count .. '|' .. row.sent .. '|' .. row.priority .. '|' .. row.expires .. '|' .. row.place .. '|'
        .. row.token .. '|' .. (row.session or '')
end

local function row_of(base, sequence)
    local text = redis.call('HGET', base .. 'state', sequence)
    return text and read(text)
end

-- Return the id that the sender gave a message, or nil.
local function id_of(base, sequence)
    local head = redis.call('HGET', base .. 'head', sequence)
    local id = head and cjson.decode(head)[1]
    return type(id) == 'string' and id or nil
end

local function save(base, sequence, row)
    redis.call('HSET', base .. 'state', sequence, text_of(row))
end

local function rank(row, sequence)
    return (9 - row.priority) * RANK + sequence
end

local settings = {}  -- their texts; false for those that are not declared
local function setting(base, name, default)
    local key = base .. name
    if settings[key] == nil then
        settings[key] = redis.call('HGET', base .. 'settings', name)
    end
    return tonumber(settings[key] or default)
end
