-- A message's row in the hash "state", and the settings of its queue.

-- Return the row in *text*. If that is unreadable, it is that of a message which was not delivered yet, sent now, in *place*.
local function read(text, place)
    local count, sent, priority, expires, found, token, session =
        string.match(text or '', '^(%d+)|(%d+)|(%d)|(%d+)|([qfd])|([^|]*)|(.*)$')
    if not count then
        return {count = 0, sent = string.format('%.0f', NOW), priority = 0, expires = 0, place = place or 'q', token = ''}
    end
    return {
        count = math.min(tonumber(count), COUNT_MAX), sent = sent, priority = tonumber(priority),
        expires = math.min(tonumber(expires), TIME_MAX), place = found, token = token,
        session = session ~= '' and session or nil,
    }
end

-- Return whether *member* of a place can be the sequence of a message.
local function is_sequence(member)
    return #member <= 15 and not string.find(member, '%D')
end

local function text_of(row)
    return row.count .. '|' .. row.sent .. '|' .. row.priority .. '|' .. row.expires .. '|' .. row.place .. '|'
        .. row.token .. '|' .. (row.session or '')
end

-- Return the row of a message, which is in *place* if that is unreadable; nil if there is no such message.
local function row_of(base, sequence, place)
    local text = redis.call('HGET', base .. 'state', sequence)
    if not text and redis.call('HEXISTS', base .. 'body', sequence) == 0 or not is_sequence(sequence) then
        return nil
    end
    return read(text, place)
end

local is_json_set = false

-- Return cjson, as its settings are at first: it is one for all scripts of the server, and any of them may change these. A
-- user who may run scripts on no key of ours could otherwise make the server round times, and refuse what is nested.
local function json()
    if not is_json_set then
        is_json_set = true
        cjson.encode_number_precision(14)
        cjson.encode_max_depth(1000)
        cjson.decode_max_depth(1000)
    end
    return cjson
end

-- Return the array in a JSON text, or an empty one.
local function decoded(text)
    local is_read, found = pcall(json().decode, text or '')
    return is_read and type(found) == 'table' and found or {}
end

-- Return the id that the sender gave a message, by its head, or nil.
local function id_in(head)
    local id = head and decoded(head)[1]
    return type(id) == 'string' and id or nil
end

local function id_of(base, sequence)
    return id_in(redis.call('HGET', base .. 'head', sequence))
end

local function save(base, sequence, row)
    redis.call('HSET', base .. 'state', sequence, text_of(row))
end

local function rank(row, sequence)
    return (9 - row.priority) * RANK + sequence
end

-- Return those of *sequences* that are messages, and their states.
local function known_in(base, sequences)
    local known, states = {}, {}
    for i, text in ipairs(fetch('HMGET', base .. 'state', sequences)) do
        if is_sequence(sequences[i]) and (text or redis.call('HEXISTS', base .. 'body', sequences[i]) == 1) then
            known[#known + 1], states[#states + 1] = sequences[i], text
        end
    end
    return known, states
end

local settings = {}  -- their texts; false for those that are not declared

-- Return the number in the text of a setting, from *least* to *most*; *default* if there is none.
local function number_in(text, least, most, default)
    local number = tonumber(text or nil)
    return number and number >= least and number <= most and number or default
end

local function setting(base, name, default)
    local key = base .. name
    if settings[key] == nil then
        settings[key] = redis.call('HGET', base .. 'settings', name)
    end
    local is_time = name == 'dedupe_window'
    return number_in(settings[key], is_time and 0 or 1, is_time and 250e9 or COUNT_MAX, default)
end
