-- Under a lock: renewals and verdicts.

-- name: renew (lock in ms; for each: number of its key, q, d or s, token, sequence or session)
local ends = NOW + ARGV[1]
local answers = {}
-- Never to an earlier time: a renewal that was given up may arrive after newer ones, which extend it further.
local function extended(key, which)
    redis.call('ZADD', key, 'GT', ends, which)
    return tonumber(redis.call('ZSCORE', key, which))
end
for i = 2, #ARGV, 4 do
    local base, kind, token, which = KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    local answer = 0
    if kind == 's' then
        if session_holds(base, which, token) then
            answer = extended(base .. 'sessions', which)
        end
    else
        local key = base .. (kind == 'd' and 'dead:locked' or 'locked')
        local score = redis.call('ZSCORE', key, which)
        local row = locked_row(base, kind == 'd', redis.call('HGET', base .. 'state', which), score, token)
        if row and tonumber(score) == NEVER then
            answer = tonumber(redis.call('ZSCORE', base .. 'sessions', row.session))
        elseif row then
            answer = extended(key, which)
        end
    end
    answers[#answers + 1] = answer
end
return answers

-- name: holds (for each: q or d, token, sequence)
local answers = {}
for i = 1, #ARGV, 3 do
    local is_dead, token, which = ARGV[i] == 'd', ARGV[i + 1], ARGV[i + 2]
    local score = redis.call('ZSCORE', KEYS[1] .. (is_dead and 'dead:locked' or 'locked'), which)
    answers[#answers + 1] = locked_row(KEYS[1], is_dead, redis.call('HGET', KEYS[1] .. 'state', which), score, token) and 1 or 0
end
return answers

-- name: settle (groups, each: number of its key, q or d, token, verdict, how many, their sequences, then the arguments
-- of the verdict: A delay in ms, error. D reason, description, error. X remember in ms, id, how many sends, and each:
-- number of its key, then the arguments of keep)
local answers, notified, done = {}, {}, {}
local at = 1
local function argument()
    at = at + 1
    return ARGV[at - 1]
end
local function forget(base, is_dead, sequences)
    for _, key in ipairs({'state', 'body', 'head', 'history'}) do
        if redis.call('HLEN', base .. key) > 0 then
            many('HDEL', base .. key, sequences)
        end
    end
    if is_dead then
        many('HDEL', base .. 'death', sequences)
        many('ZREM', base .. 'dead', sequences)
    end
end
local function apply_verdict(verdict, base, is_dead, sequence, row, extra)
    if verdict == 'A' or verdict == 'G' then
        notified[base .. (is_dead and 'dead' or 'live')] = true
        if not is_dead then
            if verdict == 'G' then
                row.count = row.count - 1
            else
                add_attempt(base, sequence, row, 'abandoned', extra[2])
                if dead_letter_if_exhausted(base, sequence, row) then
                    return 2
                end
            end
        end
        put(base, sequence, row, NOW + (verdict == 'A' and tonumber(extra[1]) or 0))
        return row.place == 'd' and not is_dead and 3 or 1  -- it has expired
    elseif verdict == 'F' then
        row.place = 'f'
        put(base, sequence, row, NOW)
    elseif verdict == 'D' then
        add_attempt(base, sequence, row, 'rejected', extra[3])
        dead_letter(base, sequence, row, extra[1], extra[2])
    end
    return 1
end
while at <= #ARGV do
    local base, is_dead = KEYS[tonumber(argument())], argument() == 'd'
    local token, verdict, size = argument(), argument(), tonumber(argument())
    local sequences, extra, sends = {}, {}, {}
    for i = 1, size do
        sequences[i] = argument()
    end
    for i = 1, verdict == 'A' and 2 or verdict == 'D' and 3 or verdict == 'X' and 2 or 0 do
        extra[i] = argument()
    end
    if verdict == 'X' then
        for i = 1, tonumber(argument()) do
            sends[i] = {KEYS[tonumber(argument())], argument(), argument(), argument(), argument()}
            local refused = refusal_to_send(sends[i][1])
            if refused then
                return refused
            end
        end
    end
    local locks = base .. (is_dead and 'dead:locked' or 'locked')
    local texts = fetch('HMGET', base .. 'state', sequences)
    local scores = fetch('ZMSCORE', locks, sequences)
    local settled = {}
    local is_complete = verdict == 'C' or verdict == 'X'
    local held = (is_dead and '|d|' or '|q|') .. token .. '|'  -- most rows contain this, and need no table
    for i, sequence in ipairs(sequences) do
        local mark = base .. sequence
        local text, score = texts[i], tonumber(scores[i] or 0)
        local row
        if done[mark] then
            row = nil
        elseif is_complete and token ~= '' and text and score > NOW and score < NEVER and string.find(text, held, 1, true) then
            row = true
        else
            row = locked_row(base, is_dead, text, scores[i], token)
        end
        if row then
            done[mark] = true
            settled[#settled + 1] = sequence
            if score == NEVER then
                redis.call('SREM', base .. 'held:' .. row.session, sequence)
            end
            if is_complete then
                answers[#answers + 1] = 1
            else
                redis.call('ZREM', locks, sequence)
                answers[#answers + 1] = apply_verdict(verdict, base, is_dead, sequence, row, extra)
            end
        else
            answers[#answers + 1] = 0
        end
    end
    if #settled > 0 and not is_dead and not notified[base .. 'live'] and frees_places(base) then
        notified[base .. 'live'] = true
    end
    if is_complete then
        many('ZREM', locks, settled)
        forget(base, is_dead, settled)
        if verdict == 'X' and #settled > 0 then
            if tonumber(extra[1]) > 0 then
                forget_expired(base, 'inbox', NOW, 1)
                redis.call('ZADD', base .. 'inbox', 'GT', NOW + extra[1], extra[2])
            end
            for _, send in ipairs(sends) do
                keep(unpack(send))
                notified[send[1] .. 'live'] = true
            end
        end
    end
end
for channel in pairs(notified) do
    publish(channel)
end
return answers
