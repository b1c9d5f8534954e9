-- Statements that peek at live messages and purge them, and that move dead letters to another queue. They are statements,
-- not functions of the database, so that they work on a schema that an older tenure has made.
--
-- A tenure._queue.broker.LiveSelection is $2 to $6: after, numbers, ids, session, sent_before. $7 is the limit, $8 the
-- states by number. Lanes, marks and "+ 0" are as in the functions. The shared parts come first, and replace their names
-- in braces: {fits} is whether a message m of the queue q is selected, {begin} the first number at which a message of
-- l.lane can be live.

-- name: fits
    ($3::bigint[] IS NULL OR m.seq = ANY ($3))
    AND ($4::text[] IS NULL OR coalesce(m.id, q.name || '{id_mark}' || m.seq) = ANY ($4))
    AND ($5::text IS NULL OR m.session = $5)
    AND ($6::double precision IS NULL OR m.enqueued_at < $6)

-- name: begin
CASE
    WHEN l.lane >= 10 THEN 0
    WHEN mark.keys[1 + l.lane] < 'Infinity' THEN mark.keys[1 + l.lane]::bigint
    ELSE {int_max}
END

-- name: lanes
SELECT first.seq
FROM {schema}.queue AS q
CROSS JOIN LATERAL (SELECT {schema}._marks(q.id) AS keys OFFSET 0) AS mark
CROSS JOIN generate_series(0, 11) AS l (lane)
CROSS JOIN LATERAL (
    SELECT m.seq
    FROM {schema}.message AS m
    WHERE m.queue = q.id AND {schema}._lane(m.state, m.session, m.priority) = l.lane
      AND m.seq + 0 >= {begin}
      AND m.seq + 0 > $2::bigint AND {fits}
    ORDER BY m.seq + 0
    LIMIT $7::bigint
) AS first
WHERE q.name = $1 AND CASE WHEN l.lane = 11 THEN 3 ELSE 0 END = ANY ($8::integer[])

-- name: dues
SELECT first.seq
FROM {schema}.queue AS q
CROSS JOIN LATERAL (SELECT {schema}._marks(q.id) AS keys OFFSET 0) AS mark
CROSS JOIN generate_series(1, 2) AS s (state)
CROSS JOIN LATERAL (
    SELECT m.seq
    FROM {schema}.message AS m
    WHERE m.queue = q.id AND m.state = s.state::smallint AND m.due_at >= mark.keys[11 + s.state]
      AND m.seq + 0 > $2::bigint AND {fits}
    ORDER BY m.seq + 0
    LIMIT $7::bigint
) AS first
WHERE q.name = $1 AND s.state = ANY ($8::integer[])

-- name: peek
-- Show messages in order of their numbers.
WITH found AS MATERIALIZED (({lanes}) UNION ALL ({dues}) ORDER BY 1 LIMIT $7::bigint)
SELECT m.seq, m.id, m.body, m.headers, {schema}._counted(m.state, m.token, m.deliveries), m.enqueued_at,
    CASE WHEN m.state = 1 THEN coalesce({schema}._extended(m.seq, m.token, m.due_at), m.due_at) END, m.session, m.priority,
    m.reply_to, m.correlation_id, m.state, CASE WHEN m.state = 2 THEN m.due_at END,
    -- The process that has locked it, and its token, which has the time; a random token of an older version is positive.
    CASE WHEN m.state = 1 THEN (SELECT p.name FROM {schema}.process AS p WHERE p.origin = (-m.token) >> 32) END,
    CASE WHEN m.state = 1 THEN m.token END
FROM found JOIN {schema}.message AS m ON m.seq BETWEEN found.seq AND found.seq
ORDER BY m.seq

-- name: count
SELECT count(*) FROM (({lanes}) UNION ALL ({dues})) AS found

-- name: purge_lane
-- Remove messages of lane $8 behind $2. Rows that other transactions have locked are skipped.
WITH selected AS MATERIALIZED (
    SELECT m.seq
    FROM {schema}.queue AS q
    CROSS JOIN LATERAL (SELECT {schema}._marks(q.id) AS keys OFFSET 0) AS mark
    CROSS JOIN (SELECT $8::integer AS lane) AS l
    CROSS JOIN LATERAL (
        SELECT m.seq
        FROM {schema}.message AS m
        WHERE m.queue = q.id AND {schema}._lane(m.state, m.session, m.priority) = l.lane
          AND m.seq + 0 >= {begin}
          AND m.seq + 0 > $2::bigint AND {fits}
        ORDER BY m.seq + 0
        LIMIT $7::bigint
        FOR UPDATE SKIP LOCKED
    ) AS m
    WHERE q.name = $1
), gone AS (
    DELETE FROM {schema}.message AS m USING selected
    WHERE m.seq BETWEEN selected.seq AND selected.seq AND m.state <> 1
    RETURNING m.queue, m.seq, m.state
), counted AS (
    INSERT INTO {schema}.tally (queue, ready, deferred)
    SELECT queue, -count(*) FILTER (WHERE state = 0), -count(*) FILTER (WHERE state = 3) FROM gone GROUP BY queue
)
SELECT count(*), max(seq), false FROM gone

-- name: purge_delayed
-- Remove messages that are delayed until $8 or later. A delivered one holds up its session, and another transaction may
-- remove or settle a second one that holds it up at the same time, while neither sees the other's deletion. So the session
-- is offered in any case: the row appears together with the deletion, and accept() checks whether it is right.
WITH selected AS MATERIALIZED (
    SELECT m.seq, m.due_at
    FROM {schema}.queue AS q
    CROSS JOIN LATERAL (SELECT {schema}._marks(q.id) AS keys OFFSET 0) AS mark
    CROSS JOIN LATERAL (
        SELECT m.seq, m.due_at
        FROM {schema}.message AS m
        WHERE m.queue = q.id AND m.state = 2::smallint AND m.due_at >= greatest(mark.keys[13], $8::double precision)
          AND m.seq + 0 > $2::bigint AND {fits}
        ORDER BY m.due_at
        LIMIT $7::bigint
        FOR UPDATE SKIP LOCKED
    ) AS m
    WHERE q.name = $1
), gone AS (
    DELETE FROM {schema}.message AS m USING selected
    WHERE m.seq BETWEEN selected.seq AND selected.seq AND m.state = 2
    RETURNING m.queue, m.seq, m.due_at, m.session, {schema}._turn(m.state, m.deliveries, m.is_deferred) AS turn
), offered AS (
    INSERT INTO {schema}.waiting (queue, seq, session)
    SELECT queue, min(seq), session FROM gone WHERE session IS NOT NULL AND turn = 1 GROUP BY queue, session
), counted AS (
    INSERT INTO {schema}.tally (queue, delayed) SELECT queue, -count(*) FROM gone GROUP BY queue
)
SELECT count(*), max(due_at), coalesce(bool_or(session IS NOT NULL AND turn = 1), false) FROM gone

-- name: move
-- Send dead letters ($2 to $7 as in revive) to the queue $8, as new messages without ids, so that none is taken for a
-- duplicate. Return their numbers, and the ids and histories that "moved" writes into them.
WITH gone AS (
    DELETE FROM {schema}.dead AS d
    USING {schema}.queue AS q, LATERAL {schema}._meant(
        q.id, q.name, $2::bigint[], $3::text[], $4::text, $5::double precision, $6::bigint, $7::integer, {schema}.clock(),
        false
    ) AS selected (seq)
    WHERE q.name = $1 AND d.seq BETWEEN selected.seq AND selected.seq AND (d.token IS NULL OR d.due_at <= {schema}.clock())
    RETURNING d.*
), counted AS (
    INSERT INTO {schema}.tally (queue, dead) SELECT queue, -count(*) FROM gone GROUP BY queue
)
SELECT {schema}.send_many(
        $8::text, array_agg(body ORDER BY seq), NULL, array_agg(headers ORDER BY seq), NULL, NULL, NULL,
        array_agg(session ORDER BY seq), array_agg(priority::integer ORDER BY seq), array_agg(reply_to ORDER BY seq),
        array_agg(correlation_id ORDER BY seq)
    ),
    array_agg(coalesce(id, $1 || '{id_mark}' || seq) ORDER BY seq),
    array_agg(history::text ORDER BY seq)
FROM gone
HAVING count(*) > 0

-- name: moved
UPDATE {schema}.message AS m SET id = a.id, history = a.history::jsonb
FROM unnest($1::bigint[], $2::text[], $3::text[]) AS a (seq, id, history)
WHERE m.seq BETWEEN a.seq AND a.seq

-- name: holding
-- Whether each of these queues holds messages, and whether this server can only be read. A queue whose counts are in many
-- rows is in use: it counts as one that does.
-- OFFSET 0: each queue is looked up by itself, whatever their number.
-- "pg_catalog" and "::numeric": so that nothing of another user fits the types better; see SEARCH_PATH.
SELECT coalesce(found.holds, false), current_setting('transaction_read_only')::boolean
FROM pg_catalog.unnest($1::text[]) WITH ORDINALITY AS a (name, place)
LEFT JOIN LATERAL (
    SELECT (
        SELECT count(*) > 50 OR sum(live) > 0::numeric
        FROM (
            SELECT t.ready::numeric + t.locked::numeric + t.delayed::numeric AS live FROM {schema}.tally AS t WHERE t.queue = q.id LIMIT 51
        ) AS counted
    ) AS holds
    FROM {schema}.queue AS q
    WHERE q.name = a.name
    OFFSET 0
) AS found ON true
ORDER BY a.place;
