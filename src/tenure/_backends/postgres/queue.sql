-- The functions of queues, beside the tables of version 4. One call of a function is one step: it stands or not.
--
-- Their names begin with p_ for what is given and v_ for what is found. "v_now" is read once in each call.
-- The settings at their heads keep plans from turning bad when a table that was planned for when empty is full: there
-- is one right way through each of them, by its index.
--
-- Rows are joined by number as "m.seq BETWEEN a.seq AND a.seq". Joined by "=", the index is of use for its order as well:
-- where the statistics are of a moment with few messages, the planner then walks through all of it, and so through all
-- that was consumed and is not vacuumed yet. "coalesce(due_at, 0)" keeps a condition from an index in the same way.

-- --- indexes of messages -----------------------------------------------------------------------------------------

-- Each index of a table costs each statement that writes to it, also if it writes nothing into this one. So there are
-- four: by number, by what is due, and these two.

-- Return where a message stands that nobody has: 0 to 9 its priority, 10 if it is a session's, 11 if it is deferred.
CREATE OR REPLACE FUNCTION {schema}._lane(p_state smallint, p_session text, p_priority smallint) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE p_state WHEN 0 THEN CASE WHEN p_session IS NULL THEN p_priority ELSE 10 END WHEN 3 THEN 11 END
$$;

-- Return 0 for what can be claimed in a session, 1 for what was delivered and is not settled: it holds up the others.
CREATE OR REPLACE FUNCTION {schema}._turn(p_state smallint, p_deliveries integer, p_is_deferred boolean) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_state = 0 THEN 0 WHEN p_state IN (1, 2) AND p_deliveries > 0 AND NOT p_is_deferred THEN 1 END
$$;

-- Only where they are missing: even a CREATE INDEX that finds its index waits for each transaction that has sent, and all
-- who send or claim wait behind it. With the lock that the last statement needs from the first on: or there are deadlocks.
-- "seq + 0" is an order that no other index has, so that no plan takes another one.
DO $$
BEGIN
    IF to_regclass('{schema}.message_turn') IS NULL THEN
        LOCK TABLE {schema}.message IN ACCESS EXCLUSIVE MODE;
        CREATE INDEX message_order ON {schema}.message (queue, {schema}._lane(state, session, priority), (seq + 0))
            WHERE {schema}._lane(state, session, priority) IS NOT NULL;
        CREATE INDEX message_turn
            ON {schema}.message (queue, session, {schema}._turn(state, deliveries, is_deferred), (seq + 0))
            WHERE session IS NOT NULL AND {schema}._turn(state, deliveries, is_deferred) IS NOT NULL;
        DROP INDEX IF EXISTS {schema}.message_ready, {schema}.message_session_ready, {schema}.message_session,
            {schema}.message_session_next, {schema}.message_session_back, {schema}.message_deferred;
    END IF;
END
$$;

-- --- small things ------------------------------------------------------------------------------------------------

-- Return a queue's number; it comes into being when first used, or used again after it was deleted.
CREATE OR REPLACE FUNCTION {schema}._queue(p_name text) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer;
    v_deleted_at double precision;
BEGIN
    SELECT id, deleted_at INTO v_queue, v_deleted_at FROM {schema}.queue WHERE name = p_name;
    IF v_deleted_at IS NOT NULL THEN
        UPDATE {schema}.queue SET deleted_at = NULL WHERE id = v_queue RETURNING id INTO v_queue;
    END IF;
    IF v_queue IS NULL THEN
        INSERT INTO {schema}.queue (name, lock, max_deliveries, dedupe_window, body_max)
        VALUES (p_name, {lock}, {max_deliveries}, {dedupe_window}, {body_max})
        ON CONFLICT (name) DO UPDATE SET deleted_at = NULL
        RETURNING id INTO v_queue;
    END IF;
    RETURN v_queue;
END
$$;

-- Add an attempt to a history, of which the newest {history_max} are kept.
CREATE OR REPLACE FUNCTION {schema}._remember(
    p_history jsonb, p_number integer, p_at double precision, p_outcome text, p_error jsonb
) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN jsonb_array_length(p_history) >= {history_max} THEN p_history - 0 ELSE coalesce(p_history, '[]') END
        || jsonb_build_array(jsonb_build_array(p_number, p_at, p_outcome, p_error))
$$;

-- Move a locked message to the dead letters.
CREATE OR REPLACE FUNCTION {schema}._bury(
    p_message {schema}.message, p_reason text, p_description text, p_now double precision
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM {schema}.message WHERE seq = p_message.seq;
    INSERT INTO {schema}.dead (
        seq, queue, enqueued_at, dead_at, deliveries, priority, id, session, reply_to, correlation_id, headers,
        reason, description, history, body
    ) VALUES (
        p_message.seq, p_message.queue, p_message.enqueued_at, p_now, p_message.deliveries, p_message.priority,
        p_message.id, p_message.session, p_message.reply_to, p_message.correlation_id, p_message.headers,
        p_reason, p_description, p_message.history, p_message.body
    );
    INSERT INTO {schema}.tally (queue, locked, dead) VALUES (p_message.queue, -1, 1);
END
$$;

CREATE OR REPLACE FUNCTION {schema}._tried(p_deliveries integer) RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT format('delivered %s times, and never completed', p_deliveries) $$;

CREATE OR REPLACE FUNCTION {schema}._expired() RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT 'not handled before its ttl had ended' $$;

-- Note the deaths that no verdict's answer tells of, as [[number, id, deliveries, reason], …], until the transaction ends:
-- the question that has brought them about returns them with its answer (_told).
CREATE OR REPLACE FUNCTION {schema}._tell(p_died jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('tenure.died', (coalesce({schema}._told(), '[]')::jsonb || p_died)::text, true);
END
$$;

CREATE OR REPLACE FUNCTION {schema}._told() RETURNS text
LANGUAGE sql STABLE AS $$ SELECT nullif(current_setting('tenure.died', true), '') $$;

-- Return until when the lock of a claim holds beyond what its message's row says, or NULL.
CREATE OR REPLACE FUNCTION {schema}._extended(p_seq bigint, p_token bigint, p_now double precision) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT until FROM {schema}.extended WHERE seq = p_seq AND token = p_token AND until > p_now
$$;

-- --- marks -------------------------------------------------------------------------------------------------------

-- Under an open snapshot, what was consumed stays in the indexes, and who looks for the first live entry walks all of it.
-- So questions begin at a mark, below which nothing is live. There are 14 for each queue: the first ready message by
-- priority (1 to 10), the first due_at by state (11 to 13), the first row of the tally (14).
--
-- Marks are raised in three steps, each a transaction: propose(), writers(), and raise_marks() when those writers have
-- ended. The rules are:
--
-- 1. A statement that makes something live below a mark that is raised or proposed leaves a row with it (_lower), after it
--    has written. Messages with new numbers and no priority need none: what is proposed is a number that was given out
--    before. Infinity is a mark, too: nothing is live, and there is nothing to look for. A new queue begins with such.
-- 2. A transaction that wrote before it could see the proposal is one of those writers. When they have ended,
--    raise_marks() sees what they wrote, and raises no mark above it.

-- Return where to begin.
CREATE OR REPLACE FUNCTION {schema}._marks(p_queue integer) RETURNS double precision[]
LANGUAGE plpgsql AS $$
DECLARE
    -- All of one snapshot: in a later one, marks may be raised, and what they were lowered by be gone. A cursor reads row
    -- by row, and nothing behind those that were raised last.
    c_marks CURSOR FOR SELECT m.kind, m.keys FROM {schema}.mark AS m WHERE m.queue = p_queue ORDER BY m.n DESC;
    v_kind smallint;
    v_keys double precision[];
    v_lowest double precision[];
BEGIN
    OPEN c_marks;
    LOOP
        FETCH c_marks INTO v_kind, v_keys;
        IF NOT FOUND THEN
            v_keys := '{marks}';
            v_kind := 2;
        END IF;
        IF v_lowest IS NULL AND v_kind <> 1 THEN
            v_lowest := v_keys;
        ELSIF v_kind <> 1 THEN
            v_lowest := ARRAY[
                least(v_keys[1], v_lowest[1]), least(v_keys[2], v_lowest[2]), least(v_keys[3], v_lowest[3]), least(v_keys[4], v_lowest[4]),
                least(v_keys[5], v_lowest[5]), least(v_keys[6], v_lowest[6]), least(v_keys[7], v_lowest[7]), least(v_keys[8], v_lowest[8]),
                least(v_keys[9], v_lowest[9]), least(v_keys[10], v_lowest[10]), least(v_keys[11], v_lowest[11]),
                least(v_keys[12], v_lowest[12]), least(v_keys[13], v_lowest[13]), least(v_keys[14], v_lowest[14])
            ];
        END IF;
        EXIT WHEN v_kind = 2;
    END LOOP;
    CLOSE c_marks;
    RETURN v_lowest;
END
$$;

-- Return the marks of what was made ready, given by priority and number, or due. NULL is nothing.
CREATE OR REPLACE FUNCTION {schema}._lows(
    p_priorities smallint[], p_numbers bigint[], p_expires double precision, p_unlocks double precision,
    p_appears double precision
) RETURNS double precision[]
LANGUAGE sql AS $$
    SELECT array_agg(coalesce(a.first, 'Infinity') ORDER BY a.priority)
        || ARRAY[coalesce(p_expires, 'Infinity'), coalesce(p_unlocks, 'Infinity'), coalesce(p_appears, 'Infinity')]
        || 'Infinity'::double precision
    FROM (
        SELECT p.priority, min(m.seq)::double precision AS first
        FROM generate_series(0, 9) AS p (priority)
        LEFT JOIN unnest(p_priorities, p_numbers) AS m (priority, seq) USING (priority)
        GROUP BY p.priority
    ) AS a
$$;

-- Note that something is live at p_lows, if a mark is or may be raised above it. To be called when it was written.
CREATE OR REPLACE FUNCTION {schema}._lower(p_queue integer, p_lows double precision[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_raised bigint;
    v_newest bigint;
BEGIN
    IF current_setting('transaction_isolation') = 'read committed' THEN  -- else it doesn't see what is proposed
        SELECT m.n INTO v_raised
        FROM {schema}.mark AS m WHERE m.queue = p_queue AND m.kind = 2 ORDER BY m.n DESC LIMIT 1;
        SELECT max(m.n) INTO v_newest
        FROM (
            SELECT m.n, m.keys FROM {schema}.mark AS m
            WHERE m.queue = p_queue AND m.kind IN (1, 2) AND m.n >= coalesce(v_raised, 0)
            UNION ALL
            SELECT 0, '{marks}'::double precision[] WHERE v_raised IS NULL
        ) AS m
        WHERE EXISTS (SELECT FROM unnest(m.keys, p_lows) AS a (key, low) WHERE a.low < a.key);
        IF v_newest IS NULL OR EXISTS (
            SELECT FROM {schema}.mark AS m
            WHERE m.queue = p_queue AND m.kind = 0 AND m.n > v_newest
              AND NOT EXISTS (SELECT FROM unnest(m.keys, p_lows) AS a (key, low) WHERE a.low < a.key)
        ) THEN
            RETURN;
        END IF;
    END IF;
    INSERT INTO {schema}.mark (queue, kind, keys) VALUES (p_queue, 0, p_lows);
END
$$;

-- The same for one due_at of state p_state.
CREATE OR REPLACE FUNCTION {schema}._lower_due(p_queue integer, p_state integer, p_due double precision) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    c_marks CURSOR FOR SELECT m.kind, m.keys FROM {schema}.mark AS m WHERE m.queue = p_queue ORDER BY m.n DESC;
    v_place integer := 11 + p_state;
    v_lows double precision[];
    v_is_above boolean := p_state <> 1;  -- as long as none was raised
    v_is_covered boolean;
BEGIN
    IF p_due IS NULL THEN
        RETURN;
    ELSIF current_setting('transaction_isolation') = 'read committed' THEN
        SELECT m.kind <> 1 AND m.keys[v_place] <= p_due INTO v_is_covered
        FROM {schema}.mark AS m WHERE m.queue = p_queue ORDER BY m.n DESC LIMIT 1;
        IF v_is_covered OR NOT FOUND AND p_state = 1 THEN
            RETURN;
        END IF;
        FOR v_mark IN c_marks LOOP
            IF v_mark.kind = 0 THEN
                IF v_mark.keys[v_place] <= p_due THEN
                    RETURN;
                END IF;
            ELSE
                v_is_above := v_mark.keys[v_place] > p_due;
                EXIT WHEN v_is_above OR v_mark.kind = 2;
                v_is_above := p_state <> 1;
            END IF;
        END LOOP;
        IF NOT v_is_above THEN
            RETURN;
        END IF;
    END IF;
    v_lows := array_fill('Infinity'::double precision, '{14}');
    v_lows[v_place] := p_due;
    INSERT INTO {schema}.mark (queue, kind, keys) VALUES (p_queue, 0, v_lows);
END
$$;

-- Propose to raise the marks of a queue, of which messages up to p_number were received; return the proposal's number.
--
-- That of locks is raised to no later than the next claims' locks end, so that these need leave no rows; unless
-- p_looks_ahead, it stays seconds behind. To find the first lock that holds, all that were settled are walked: it is worth
-- it where claims ask when to look again, and else it can wait until they are vacuumed.
CREATE OR REPLACE FUNCTION {schema}.propose(p_queue text, p_number bigint, p_looks_ahead boolean) RETURNS bigint
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_ends double precision;
    v_counted bigint;
    v_proposal bigint;
BEGIN
    SELECT q.id, {schema}.clock() + CASE WHEN p_looks_ahead THEN q.lock ELSE greatest(q.lock / 2, q.lock - {behind}) END
    INTO v_queue, v_ends
    FROM {schema}.queue AS q WHERE q.name = p_queue;
    INSERT INTO {schema}.tally (queue) VALUES (v_queue) RETURNING n INTO v_counted;
    INSERT INTO {schema}.mark (queue, kind, keys)
    VALUES (v_queue, 1, p_number || array_fill('Infinity'::double precision, '{10}') || ARRAY[v_ends, 'Infinity', v_counted])
    RETURNING n INTO v_proposal;
    RETURN v_proposal;
END
$$;

-- Return the transactions that write to queues just now.
CREATE OR REPLACE FUNCTION {schema}.writers() RETURNS text[]
LANGUAGE sql AS $$
    SELECT coalesce(array_agg(DISTINCT virtualtransaction), '{}')
    FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND relation IN ('{schema}.message'::regclass, '{schema}.tally'::regclass)
$$;

-- Raise the marks as proposed, but above nothing that is live; false while one of the writers goes on, NULL if another
-- proposal has taken this one's place.
CREATE OR REPLACE FUNCTION {schema}.raise_marks(p_queue text, p_proposal bigint, p_writers text[]) RETURNS boolean
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_proposed double precision[];
    v_keys double precision[];
    v_live double precision[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR {schema}.writers() && p_writers THEN
        RETURN false;
    END IF;
    SELECT q.id, m.keys INTO v_queue, v_proposed
    FROM {schema}.queue AS q JOIN {schema}.mark AS m ON m.queue = q.id
    WHERE q.name = p_queue AND m.n = p_proposal AND m.kind = 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('tenure marks {schema}', v_queue)) THEN
        RETURN false;  -- two that raise at once would wait for each other's rows
    END IF;
    v_keys := {schema}._marks(v_queue);
    SELECT array_agg(coalesce(first.key, 'Infinity') ORDER BY p.priority) INTO v_live
    FROM generate_series(0, 9) AS p (priority)
    LEFT JOIN LATERAL (
        SELECT m.seq::double precision AS key
        FROM {schema}.message AS m
        WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = p.priority
          AND m.seq + 0 >= CASE WHEN v_keys[1 + p.priority] < 'Infinity' THEN v_keys[1 + p.priority]::bigint ELSE {int_max} END
        ORDER BY m.seq + 0
        LIMIT 1
    ) AS first ON true;
    SELECT v_live || array_agg(coalesce(first.key, 'Infinity') ORDER BY s.state) INTO v_live
    FROM generate_series(0, 2) AS s (state)
    LEFT JOIN LATERAL (
        SELECT m.due_at AS key
        FROM {schema}.message AS m
        WHERE m.queue = v_queue AND m.state = s.state::smallint AND m.due_at >= v_keys[11 + s.state]
          AND m.due_at < v_proposed[11 + s.state]
        ORDER BY m.due_at
        LIMIT 1
    ) AS first ON true;
    v_live := v_live || coalesce((
        SELECT t.n::double precision FROM {schema}.tally AS t
        WHERE t.queue = v_queue AND t.n >= v_keys[14]::bigint ORDER BY t.n LIMIT 1
    ), 'Infinity');
    UPDATE {schema}.mark AS m
    SET kind = 2,
        keys = (SELECT array_agg(greatest(a.before, least(a.proposed, a.live)) ORDER BY a.place)
                FROM unnest(v_keys, m.keys, v_live) WITH ORDINALITY AS a (before, proposed, live, place))
    WHERE m.queue = v_queue AND m.n = p_proposal;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    DELETE FROM {schema}.mark AS m WHERE m.queue = v_queue AND m.n < p_proposal;
    RETURN true;
END
$$;

-- --- time --------------------------------------------------------------------------------------------------------

-- Do what time has done: end locks and delays, and bury what has died. Rows that somebody is at are left to them. Return
-- the marks, which are given.
CREATE OR REPLACE FUNCTION {schema}._pass_time(
    p_queue integer, p_now double precision, p_rounds integer, p_keys double precision[]
) RETURNS double precision[]
LANGUAGE plpgsql AS $$
DECLARE
    v_most integer;
    v_found integer;
    v_ended double precision := p_now;
    v_priorities smallint[];
    v_numbers bigint[];
    v_expires double precision;
    v_unlocks double precision;
    v_died jsonb;
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}._overdue(p_queue, p_now, p_keys)) THEN
        RETURN p_keys;
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- It doesn't see what was extended since it began.
        v_ended := least(p_now, extract(epoch FROM transaction_timestamp()));
    END IF;
    SELECT max_deliveries INTO v_most FROM {schema}.queue WHERE id = p_queue;
    FOR v_round IN 1 .. p_rounds LOOP
        WITH due AS MATERIALIZED (
            SELECT m.seq,
                   m.state,
                   m.session,
                   m.state = 1 AND m.deliveries >= v_most AS is_tried,
                   m.state = 1 AND m.deliveries >= v_most
                       OR NOT m.is_deferred AND coalesce(m.expires_at <= p_now, false) AS dies,
                   CASE WHEN m.state = 1 THEN {schema}._extended(m.seq, m.token, p_now) END AS until
            FROM generate_series(0, 2) AS s (state)
            CROSS JOIN LATERAL (
                SELECT m.*
                FROM {schema}.message AS m
                WHERE m.queue = p_queue AND m.state = s.state::smallint AND m.due_at >= p_keys[11 + s.state]
                  AND m.due_at <= CASE WHEN s.state = 1 THEN v_ended ELSE p_now END
                ORDER BY m.due_at
                LIMIT 1000
                FOR UPDATE SKIP LOCKED
            ) AS m
            LIMIT 1000
        ), held AS (
            UPDATE {schema}.message AS m SET due_at = due.until FROM due
            WHERE m.seq BETWEEN due.seq AND due.seq AND due.until IS NOT NULL
        ), doomed AS (
            DELETE FROM {schema}.message AS m USING due
            WHERE m.seq BETWEEN due.seq AND due.seq AND due.until IS NULL AND due.dies
            RETURNING m.*, due.is_tried
        ), buried AS (
            INSERT INTO {schema}.dead (
                seq, queue, enqueued_at, dead_at, deliveries, priority, id, session, reply_to, correlation_id, headers,
                reason, description, history, body
            )
            SELECT seq, queue, enqueued_at, p_now, deliveries, priority, id, session, reply_to, correlation_id, headers,
                   CASE WHEN is_tried THEN '{reason_tried}' ELSE '{reason_expired}' END,
                   CASE WHEN is_tried THEN {schema}._tried(deliveries) ELSE {schema}._expired() END,
                   CASE WHEN state = 1 THEN {schema}._remember(history, deliveries, p_now, 'expired', NULL) ELSE history END,
                   body
            FROM doomed
        ), returned AS (
            UPDATE {schema}.message AS m
            SET state = CASE WHEN m.is_deferred THEN 3 ELSE 0 END,
                token = NULL,
                due_at = CASE WHEN m.is_deferred THEN NULL ELSE m.expires_at END,
                history = CASE
                    WHEN m.state = 1 THEN {schema}._remember(m.history, m.deliveries, p_now, 'expired', NULL)
                    ELSE m.history
                END
            FROM due
            WHERE m.seq BETWEEN due.seq AND due.seq AND due.until IS NULL AND NOT due.dies
            RETURNING m.state, m.seq, m.priority, m.session, m.due_at
        ), offered AS (
            INSERT INTO {schema}.waiting (queue, seq, session)
            SELECT p_queue, min(seq), session FROM due
            WHERE until IS NULL AND session IS NOT NULL AND state <> 0
            GROUP BY session
        ), counted AS (
            INSERT INTO {schema}.tally (queue, ready, locked, delayed, deferred, dead)
            SELECT p_queue,
                   (SELECT count(*) FROM returned WHERE state = 0) - count(*) FILTER (WHERE state = 0),
                   -count(*) FILTER (WHERE state = 1),
                   -count(*) FILTER (WHERE state = 2),
                   (SELECT count(*) FROM returned WHERE state = 3),
                   count(*) FILTER (WHERE dies)
            FROM due
            WHERE until IS NULL
            HAVING count(*) > 0
        ), ready AS (
            SELECT array_agg(priority) FILTER (WHERE session IS NULL) AS priorities,
                   array_agg(seq) FILTER (WHERE session IS NULL) AS numbers,
                   min(due_at) AS expires
            FROM returned
            WHERE state = 0
        )
        SELECT (SELECT count(*) FROM due), (SELECT min(until) FROM due), r.priorities, r.numbers, r.expires, (
                   SELECT jsonb_agg(jsonb_build_array(
                       seq, id, deliveries, CASE WHEN is_tried THEN '{reason_tried}' ELSE '{reason_expired}' END
                   ))
                   FROM doomed
               )
        INTO v_found, v_unlocks, v_priorities, v_numbers, v_expires, v_died
        FROM ready AS r;
        IF v_died IS NOT NULL THEN
            PERFORM {schema}._tell(v_died);
        END IF;
        IF v_found > 0 THEN
            PERFORM {schema}._lower(p_queue, {schema}._lows(v_priorities, v_numbers, v_expires, v_unlocks, NULL));
        END IF;
        EXIT WHEN v_found < 1000;
    END LOOP;
    RETURN {schema}._marks(p_queue);
END
$$;

CREATE OR REPLACE FUNCTION {schema}._pass_time(p_queue integer, p_now double precision, p_rounds integer) RETURNS void
LANGUAGE sql AS $$ SELECT {schema}._pass_time(p_queue, p_now, p_rounds, {schema}._marks(p_queue)) $$;

-- Do what time has done, a bounded part of it; tell whether there is more to do. A question that did it all would be ended
-- by the server when its time is over, and have done nothing.
CREATE OR REPLACE FUNCTION {schema}.catch_up(p_queue text) RETURNS boolean
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_keys double precision[];
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    v_keys := {schema}._pass_time(v_queue, v_now, {rounds}, {schema}._marks(v_queue));
    IF NOT EXISTS (SELECT FROM {schema}._overdue(v_queue, v_now, v_keys)) THEN
        RETURN false;
    END IF;
    PERFORM FROM {schema}.message AS m
    WHERE m.queue = v_queue AND m.due_at <= v_now AND m.state <= 2
    ORDER BY m.due_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED;  -- what others are at is theirs
    RETURN FOUND;
END
$$;

-- Return the states in which time has changed something that is not done yet.
CREATE OR REPLACE FUNCTION {schema}._overdue(
    p_queue integer, p_now double precision, p_keys double precision[]
) RETURNS SETOF smallint
LANGUAGE sql STABLE AS $$  -- so that the planner writes its text into the query that asks
    SELECT s.state
    FROM (VALUES (1::smallint, p_keys[12]), (2::smallint, p_keys[13]), (0::smallint, p_keys[11])) AS s (state, key)
    CROSS JOIN LATERAL (
        SELECT FROM {schema}.message AS m
        WHERE m.queue = p_queue AND m.state = s.state AND m.due_at >= s.key AND m.due_at <= p_now
        LIMIT 1
    ) AS first
    WHERE s.key <= p_now
$$;

-- Return in how many seconds time alone will change something about a queue's messages, or NULL if it won't. What is
-- overdue was left to another transaction, whose end nobody is told of (or there was too much of it): then it is time to
-- look again soon.
CREATE OR REPLACE FUNCTION {schema}._due_in(
    p_queue integer, p_now double precision, p_keys double precision[]
) RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
    v_due double precision;
    v_first double precision;
BEGIN
    FOR v_state IN 0 .. 2 LOOP
        CONTINUE WHEN p_keys[11 + v_state] = 'Infinity';
        SELECT m.due_at INTO v_due
        FROM {schema}.message AS m
        WHERE m.queue = p_queue AND m.state = v_state::smallint AND m.due_at >= p_keys[11 + v_state]
        ORDER BY m.due_at
        LIMIT 1;
        IF v_due <= p_now THEN
            SELECT least(min(next.due_at), p_now + {look_again}) INTO v_due
            FROM (
                SELECT m.due_at FROM {schema}.message AS m
                WHERE m.queue = p_queue AND m.state = v_state::smallint AND m.due_at > p_now
                ORDER BY m.due_at
                LIMIT 1
            ) AS next;
        END IF;
        v_first := least(v_first, v_due);
    END LOOP;
    RETURN v_first - p_now;
END
$$;

-- --- sending -----------------------------------------------------------------------------------------------------

-- Remember ids; return in their order which messages are to be kept: those without id, and the first with one that was
-- not remembered. The join is by hash, so that the cost of a batch is linear.
CREATE OR REPLACE FUNCTION {schema}._fresh(p_queue integer, p_ids text[], p_now double precision) RETURNS boolean[]
LANGUAGE plpgsql {plans} SET enable_hashjoin = on SET enable_nestloop = off AS $$
DECLARE
    v_window double precision;
    v_fresh boolean[];
BEGIN
    SELECT dedupe_window INTO v_window FROM {schema}.queue WHERE id = p_queue;
    IF v_window = 0 THEN
        RETURN array_fill(true, ARRAY[cardinality(p_ids)]);
    END IF;
    WITH asked AS MATERIALIZED (
        SELECT id, min(place) AS place
        FROM unnest(p_ids) WITH ORDINALITY AS a (id, place)
        WHERE id IS NOT NULL
        GROUP BY id
    ), fresh AS (
        -- In the order of the ids, the same for all senders: so that two never wait for each other.
        INSERT INTO {schema}.sent AS known (queue, id, until)
        SELECT p_queue, id, p_now + v_window FROM asked ORDER BY id
        ON CONFLICT (queue, id) DO UPDATE SET until = excluded.until WHERE known.until <= p_now
        RETURNING id
    ), firsts AS (
        SELECT asked.place FROM asked JOIN fresh USING (id)
    )
    SELECT array_agg(a.id IS NULL OR firsts.place IS NOT NULL ORDER BY a.place) INTO v_fresh
    FROM unnest(p_ids) WITH ORDINALITY AS a (id, place) LEFT JOIN firsts USING (place);
    RETURN v_fresh;
END
$$;

-- Keep messages, given as columns, any but the first of which may be NULL or shorter. Return the numbers of those
-- that have no id of their own, in order.
CREATE OR REPLACE FUNCTION {schema}.send_many(
    p_queue text, p_bodies bytea[], p_ids text[] DEFAULT NULL, p_headers text[] DEFAULT NULL,
    p_delays double precision[] DEFAULT NULL, p_moments double precision[] DEFAULT NULL,
    p_ttls double precision[] DEFAULT NULL, p_sessions text[] DEFAULT NULL, p_priorities integer[] DEFAULT NULL,
    p_reply_tos text[] DEFAULT NULL, p_correlation_ids text[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer := {schema}._queue(p_queue);
    v_now double precision := {schema}.clock();
    v_fresh boolean[];
    v_numbers bigint[];
    v_firsts bigint[];
    v_sessions text[];
    v_expires double precision;
    v_appears double precision;
    v_preferred bigint[];
    v_priorities smallint[];
    v_ready bigint;
    v_all bigint;
BEGIN
    IF p_ids IS NOT NULL THEN
        v_fresh := {schema}._fresh(v_queue, p_ids, v_now);
    END IF;
    IF coalesce(p_delays, p_moments, p_ttls) IS NULL AND p_sessions IS NULL AND p_priorities IS NULL THEN
        -- All are ready, in their order, and no mark is above them: less is to be found out.
        WITH kept AS (
            INSERT INTO {schema}.message (
                queue, state, enqueued_at, priority, id, reply_to, correlation_id, headers, body
            )
            SELECT v_queue, 0, v_now, 0, a.id, a.reply_to, a.correlation_id, a.headers, a.body
            FROM unnest(p_bodies, p_ids, p_headers, p_reply_tos, p_correlation_ids, v_fresh) WITH ORDINALITY
                AS a (body, id, headers, reply_to, correlation_id, fresh, place)
            WHERE v_fresh IS NULL OR a.fresh
            ORDER BY a.place
            RETURNING seq, id
        )
        SELECT array_agg(seq ORDER BY seq) FILTER (WHERE id IS NULL), count(*) INTO v_numbers, v_all FROM kept;
        IF v_all > 0 THEN
            INSERT INTO {schema}.tally (queue, ready) VALUES (v_queue, v_all);
        END IF;
        RETURN coalesce(v_numbers, '{}');
    END IF;
    WITH asked AS (
        SELECT a.*, coalesce(a.moment, v_now + a.delay, v_now) AS visible_at, v_now + a.ttl AS expires_at
        FROM unnest(
            p_bodies, p_ids, p_headers, p_delays, p_moments, p_ttls, p_sessions, p_priorities, p_reply_tos,
            p_correlation_ids, v_fresh
        ) WITH ORDINALITY
            AS a (body, id, headers, delay, moment, ttl, session, priority, reply_to, correlation_id, fresh, place)
        WHERE v_fresh IS NULL OR a.fresh
    ), kept AS (
        INSERT INTO {schema}.message (
            queue, state, due_at, expires_at, enqueued_at, priority, id, session, reply_to, correlation_id, headers, body
        )
        SELECT v_queue,
               CASE WHEN visible_at > v_now THEN 2 ELSE 0 END,
               CASE WHEN visible_at > v_now THEN least(visible_at, expires_at) ELSE expires_at END,
               expires_at,
               v_now,
               coalesce(priority, 0),
               id,
               session,
               reply_to,
               correlation_id,
               headers,
               body
        FROM asked
        ORDER BY place
        RETURNING seq, id, state, session, due_at, priority
    )
    SELECT array_agg(seq ORDER BY seq) FILTER (WHERE id IS NULL), count(*) FILTER (WHERE state = 0), count(*),
           array_agg(seq) FILTER (WHERE state = 0 AND session IS NOT NULL),
           array_agg(session) FILTER (WHERE state = 0 AND session IS NOT NULL),
           min(due_at) FILTER (WHERE state = 0), min(due_at) FILTER (WHERE state = 2),
           array_agg(seq) FILTER (WHERE priority <> 0 AND state = 0 AND session IS NULL),
           array_agg(priority) FILTER (WHERE priority <> 0 AND state = 0 AND session IS NULL)
    INTO v_numbers, v_ready, v_all, v_firsts, v_sessions, v_expires, v_appears, v_preferred, v_priorities
    FROM kept;
    IF v_firsts IS NOT NULL THEN
        PERFORM {schema}._offer(v_queue, v_firsts, v_sessions);
    END IF;
    IF v_expires IS NOT NULL OR v_appears IS NOT NULL THEN
        PERFORM {schema}._lower_due(v_queue, 0, v_expires), {schema}._lower_due(v_queue, 2, v_appears);
    END IF;
    IF v_preferred IS NOT NULL THEN
        PERFORM {schema}._lower(v_queue, {schema}._lows(v_priorities, v_preferred, NULL, NULL, NULL));
    END IF;
    IF v_all > 0 THEN
        INSERT INTO {schema}.tally (queue, ready, delayed) VALUES (v_queue, v_ready, v_all - v_ready);
    END IF;
    RETURN coalesce(v_numbers, '{}');
END
$$;

-- Refuse what is no name of a queue.
CREATE OR REPLACE FUNCTION {schema}._check_name(p_name text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_name IS NULL OR p_name = '' OR length(p_name) > 200 OR strpos(p_name, '$') > 0 OR p_name <> btrim(p_name) THEN
        RAISE EXCEPTION 'a queue''s name has 1 to 200 characters, no $ and no space around it; % is none', p_name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Make a queue, if there is none of this name. Else the first who sends to it does, and others who would be the first
-- wait for that one's transaction to end.
CREATE OR REPLACE FUNCTION {schema}.declare(queue text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM {schema}._check_name(queue), {schema}._queue(queue);
END
$$;

-- Keep one message, in the caller's own transaction, and return its id. To be called from any language and driver.
CREATE OR REPLACE FUNCTION {schema}.send(
    queue text, body bytea, id text DEFAULT NULL, headers jsonb DEFAULT NULL, delay double precision DEFAULT 0,
    at timestamptz DEFAULT NULL, ttl double precision DEFAULT NULL, session text DEFAULT NULL,
    priority integer DEFAULT 0, reply_to text DEFAULT NULL, correlation_id text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    v_numbers bigint[];
    v_most bigint;
BEGIN
    PERFORM {schema}._check_name(queue);
    IF priority NOT BETWEEN 0 AND 9 OR ttl <= 0 OR delay < 0 OR body IS NULL THEN
        RAISE EXCEPTION 'priority must be 0 to 9, ttl more than 0, delay at least 0, and body not NULL'
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF headers IS NOT NULL AND (jsonb_typeof(headers) <> 'object'
        OR EXISTS (SELECT FROM jsonb_each(headers) AS h WHERE jsonb_typeof(h.value) NOT IN ('string', 'number', 'boolean')))
    THEN
        RAISE EXCEPTION 'headers must be an object of texts, numbers and booleans' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT q.body_max INTO v_most FROM {schema}.queue AS q WHERE q.name = send.queue;
    IF octet_length(body) > coalesce(v_most, {body_max}) THEN
        RAISE EXCEPTION 'the body (% bytes) is larger than the queue takes (%)', octet_length(body), v_most
            USING ERRCODE = 'program_limit_exceeded';
    END IF;
    v_numbers := {schema}.send_many(
        queue, ARRAY[body], ARRAY[id], ARRAY[headers::text], ARRAY[delay],
        ARRAY[extract(epoch FROM at)::double precision], ARRAY[ttl], ARRAY[session], ARRAY[priority], ARRAY[reply_to],
        ARRAY[correlation_id]
    );
    -- The same notification is sent once in a transaction, whatever it holds.
    PERFORM pg_notify('{schema}.hints', ':queue:' || queue);
    RETURN coalesce(id, queue || '{id_mark}' || v_numbers[1]);
END
$$;

-- --- receiving ---------------------------------------------------------------------------------------------------

-- Return how many of these bodies one claim takes: it ends with the one that brings it to {claim_bytes} bytes.
CREATE OR REPLACE FUNCTION {schema}._fitting(p_sizes integer[]) RETURNS integer
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_size bigint := 0;
BEGIN
    FOR v_place IN 1 .. cardinality(p_sizes) LOOP
        v_size := v_size + p_sizes[v_place];
        IF v_size >= {claim_bytes} THEN
            RETURN v_place;
        END IF;
    END LOOP;
    RETURN cardinality(p_sizes);
END
$$;

-- Claim messages. The rows come in no order: to sort them here would cost more than it does the client. Behind them may
-- come a row without number: its locked_until is the seconds until something is due, its headers are the deaths that were
-- found. A claim ends with the body that brings it to {claim_bytes} bytes: then there may be more at once, which the client
-- sees by the bodies.
--
-- Each statement and each expression of a function is paid for anew in each transaction: so there are few on the way of
-- one message.
CREATE OR REPLACE FUNCTION {schema}.receive(
    p_queue text, p_most integer, p_lock double precision, p_token bigint
) RETURNS TABLE (
    seq bigint, id text, body bytea, headers text, deliveries integer, enqueued_at double precision,
    locked_until double precision, session text, priority smallint, reply_to text, correlation_id text
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_first bigint;
    v_unlocks double precision;
    v_due double precision;
    v_is_plain boolean;  -- the marks are those that were raised last, and nothing has a priority
    v_is_covered boolean;
    v_keys double precision[];
    v_found integer;
BEGIN
    -- Before the marks are read: so this is one of the writers that raise_marks() waits for, or sees what is proposed.
    LOCK TABLE ONLY {schema}.message IN ROW EXCLUSIVE MODE;
    SELECT q.id,
           -- While none was raised: all from the beginning on.
           least(coalesce(m.keys[1], 0), 9e18::double precision)::bigint,
           coalesce(m.keys[12], 0),
           least(m.keys[11], m.keys[13], 'Infinity'),
           m.keys IS NULL OR m.kind = 2 AND m.keys[2:10] = '{others}',
           (m.keys IS NULL OR m.kind <> 1 AND m.keys[12] <= v_now + p_lock)
               AND current_setting('transaction_isolation') = 'read committed',  -- else it doesn't see what is proposed
           coalesce(m.keys, '{marks}')
    INTO v_queue, v_first, v_unlocks, v_due, v_is_plain, v_is_covered, v_keys
    FROM {schema}.queue AS q
    LEFT JOIN LATERAL (
        SELECT m.kind, m.keys FROM {schema}.mark AS m WHERE m.queue = q.id ORDER BY m.n DESC LIMIT 1
    ) AS m ON true
    WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    ELSIF v_is_plain AND v_unlocks <= v_now AND v_due > v_now THEN
        v_is_plain := NOT EXISTS (
            SELECT FROM {schema}.message AS m
            WHERE m.queue = v_queue AND m.state = 1::smallint AND m.due_at >= v_unlocks AND m.due_at <= v_now
        );
    ELSIF v_is_plain AND v_due <= v_now THEN
        v_is_plain := NOT EXISTS (SELECT FROM {schema}._overdue(v_queue, v_now, v_keys));
    END IF;
    IF NOT v_is_plain THEN
        v_keys := {schema}._pass_time(v_queue, v_now, 10, {schema}._marks(v_queue));
        headers := {schema}._told();
        RETURN QUERY
        UPDATE {schema}.message AS m
        SET state = 1, token = p_token, deliveries = m.deliveries + 1, due_at = v_now + p_lock
        WHERE m.ctid = ANY ((
            SELECT CASE WHEN sum(ready.size) < {claim_bytes} THEN array_agg(ready.ctid)
                   ELSE (array_agg(ready.ctid))[:{schema}._fitting(array_agg(ready.size))] END
            FROM (
                SELECT m.ctid, octet_length(m.body) AS size
                FROM generate_series(9, 0, -1) AS p (priority)
                CROSS JOIN LATERAL (
                    SELECT m.ctid, m.body
                    FROM {schema}.message AS m
                    WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = p.priority
                      AND m.seq + 0 >= v_keys[1 + p.priority]::bigint
                      AND (m.expires_at IS NULL OR m.expires_at > v_now)
                    ORDER BY m.seq + 0
                    LIMIT p_most
                    FOR UPDATE SKIP LOCKED
                ) AS m
                WHERE v_keys[1 + p.priority] < 'Infinity'
                LIMIT p_most
            ) AS ready
        )::tid[])
        RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
            m.reply_to, m.correlation_id;
    ELSIF p_most > 1 THEN
        RETURN QUERY
        UPDATE {schema}.message AS m
        SET state = 1, token = p_token, deliveries = m.deliveries + 1, due_at = v_now + p_lock
        WHERE m.ctid = ANY ((
            SELECT CASE WHEN sum(ready.size) < {claim_bytes} THEN array_agg(ready.ctid)
                   ELSE (array_agg(ready.ctid))[:{schema}._fitting(array_agg(ready.size))] END
            FROM (
                SELECT m.ctid, octet_length(m.body) AS size
                FROM {schema}.message AS m
                WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = 0 AND m.seq + 0 >= v_first
                  AND (m.expires_at IS NULL OR m.expires_at > v_now)  -- there may be more than were buried just now
                ORDER BY m.seq + 0
                LIMIT p_most
                FOR UPDATE SKIP LOCKED
            ) AS ready
        )::tid[])
        RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
            m.reply_to, m.correlation_id;
    ELSE
        RETURN QUERY
        UPDATE {schema}.message AS m
        SET state = 1, token = p_token, deliveries = m.deliveries + 1, due_at = v_now + p_lock
        WHERE m.ctid = ANY (ARRAY(
            SELECT m.ctid
            FROM {schema}.message AS m
            WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = 0
              AND m.seq + 0 >= v_first
              AND (m.expires_at IS NULL OR m.expires_at > v_now)
            ORDER BY m.seq + 0
            LIMIT p_most
            FOR UPDATE SKIP LOCKED
        ))
        RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
            m.reply_to, m.correlation_id;
    END IF;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    IF v_found > 0 THEN
        INSERT INTO {schema}.tally (queue, ready, locked) VALUES (v_queue, -v_found, v_found);
    END IF;
    IF v_found = p_most AND v_is_covered AND headers IS NULL THEN
        RETURN;  -- as nearly always where there is enough to do
    ELSIF v_found > 0 AND NOT v_is_covered THEN
        PERFORM {schema}._lower_due(v_queue, 1, v_now + p_lock);
    END IF;
    IF v_found < p_most THEN
        IF v_found > 0 THEN
            v_keys[12] := least(v_keys[12], v_now + p_lock);
        END IF;
        locked_until := {schema}._due_in(v_queue, v_now, v_keys);
        RETURN NEXT;
    ELSIF headers IS NOT NULL THEN
        RETURN NEXT;
    END IF;
END
$$;

-- Claim deferred messages by their numbers.
CREATE OR REPLACE FUNCTION {schema}.receive_deferred(
    p_queue text, p_numbers bigint[], p_lock double precision, p_token bigint
) RETURNS TABLE (
    seq bigint, id text, body bytea, headers text, deliveries integer, enqueued_at double precision,
    locked_until double precision, session text, priority smallint, reply_to text, correlation_id text
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_found integer;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM {schema}._pass_time(v_queue, v_now, 10);
    RETURN QUERY
    UPDATE {schema}.message AS m
    SET state = 1, token = p_token, deliveries = m.deliveries + 1, due_at = v_now + p_lock
    WHERE m.ctid = ANY (ARRAY(
        SELECT (
            SELECT put_aside.ctid FROM {schema}.message AS put_aside
            WHERE put_aside.seq = a.seq AND put_aside.queue = v_queue AND put_aside.state = 3
            FOR UPDATE SKIP LOCKED
        )
        FROM (SELECT DISTINCT seq FROM unnest(p_numbers) AS a (seq) ORDER BY seq) AS a
    ))
    RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
        m.reply_to, m.correlation_id;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    IF v_found > 0 THEN
        INSERT INTO {schema}.tally (queue, deferred, locked) VALUES (v_queue, -v_found, v_found);
        PERFORM {schema}._lower_due(v_queue, 1, v_now + p_lock);
    END IF;
END
$$;

-- Claim dead letters. Here, histories count for the size of a claim as bodies do.
CREATE OR REPLACE FUNCTION {schema}.receive_dead(
    p_queue text, p_most integer, p_lock double precision, p_token bigint
) RETURNS TABLE (
    seq bigint, id text, body bytea, headers text, deliveries integer, enqueued_at double precision,
    locked_until double precision, session text, priority smallint, reply_to text, correlation_id text,
    reason text, description text, dead_at double precision, history text
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM {schema}._pass_time(v_queue, v_now, 10);
    RETURN QUERY
    UPDATE {schema}.dead AS d
    SET token = p_token, due_at = v_now + p_lock
    WHERE d.ctid = ANY ((
        SELECT (array_agg(free.ctid))[:{schema}._fitting(array_agg(free.size))]
        FROM (
            SELECT free.ctid, octet_length(free.body) + coalesce(octet_length(free.history::text), 0) AS size
            FROM {schema}.dead AS free
            WHERE free.queue = v_queue AND (free.due_at IS NULL OR free.due_at <= v_now)
            ORDER BY free.priority DESC, free.seq
            LIMIT p_most
            FOR UPDATE SKIP LOCKED
        ) AS free
    )::tid[])
    RETURNING d.seq, d.id, d.body, d.headers, d.deliveries, d.enqueued_at, d.due_at, d.session, d.priority,
        d.reply_to, d.correlation_id, d.reason, d.description, d.dead_at, d.history::text;
END
$$;

-- --- under a lock ------------------------------------------------------------------------------------------------

-- Extend locks; return their ends in the order asked, NULL for those that are over. None ends sooner than before: so no
-- mark is above the new end that was not above the old one. A row that another transaction is at, such as the handler's
-- own, is not waited for: its lock is extended beside it. But only if the old end is farther off than the client waits
-- for the answer: so that a claim after the old end sees the new one.
CREATE OR REPLACE FUNCTION {schema}.renew_many(
    p_queue text, p_numbers bigint[], p_tokens bigint[], p_lock double precision
) RETURNS SETOF double precision
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_until double precision := v_now + p_lock;
    v_found integer;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    WITH held AS MATERIALIZED (
        SELECT m.seq
        FROM (SELECT * FROM unnest(p_numbers, p_tokens) AS a (seq, token) ORDER BY seq) AS a
        JOIN {schema}.message AS m ON m.seq BETWEEN a.seq AND a.seq
        WHERE m.queue = v_queue AND m.state = 1 AND m.token = a.token
          AND (m.due_at > v_now OR {schema}._extended(m.seq, m.token, v_now) > v_now)
          AND (m.session IS NULL OR m.is_deferred)
        FOR UPDATE OF m SKIP LOCKED
    )
    UPDATE {schema}.message AS m SET due_at = greatest(m.due_at, v_until) FROM held
    WHERE m.seq BETWEEN held.seq AND held.seq;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    IF v_found < cardinality(p_numbers) THEN
        INSERT INTO {schema}.extended (seq, token, until)
        SELECT DISTINCT a.seq, a.token, v_until
        FROM unnest(p_numbers, p_tokens) AS a (seq, token)
        JOIN {schema}.message AS m ON m.seq BETWEEN a.seq AND a.seq
        WHERE m.queue = v_queue AND m.state = 1 AND m.token = a.token AND coalesce(m.due_at, 0) < v_until
          AND greatest(m.due_at, {schema}._extended(m.seq, m.token, v_now)) > v_now + greatest(1, p_lock / 3)
          AND (m.session IS NULL OR m.is_deferred)
        ORDER BY a.seq
        ON CONFLICT (seq, token) DO UPDATE SET until = greatest(extended.until, excluded.until);
    END IF;
    -- What a session's lock covers ends with that, and is not extended by itself.
    RETURN QUERY
    SELECT CASE WHEN held.until >= v_until OR held.is_covered AND held.until > v_now THEN held.until END
    FROM unnest(p_numbers, p_tokens) WITH ORDINALITY AS a (seq, token, place)
    LEFT JOIN LATERAL (
        SELECT greatest(m.due_at, {schema}._extended(m.seq, m.token, v_now)) AS until,
               m.session IS NOT NULL AND NOT m.is_deferred AS is_covered
        FROM {schema}.message AS m
        WHERE m.seq BETWEEN a.seq AND a.seq AND m.queue = v_queue AND m.state = 1 AND m.token = a.token
    ) AS held ON true
    ORDER BY a.place;
END
$$;

CREATE OR REPLACE FUNCTION {schema}.renew_dead(
    p_queue text, p_numbers bigint[], p_tokens bigint[], p_lock double precision
) RETURNS SETOF double precision
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    -- Each by its number: "queue + 0" is an order of no index.
    UPDATE {schema}.dead AS d
    SET due_at = greatest(d.due_at, v_now + p_lock)
    WHERE d.ctid = ANY (ARRAY(
        SELECT (
            SELECT d.ctid FROM {schema}.dead AS d
            WHERE d.seq = a.seq AND d.queue + 0 = v_queue AND d.token = a.token AND d.due_at > v_now
            FOR UPDATE
        )
        FROM (SELECT * FROM unnest(p_numbers, p_tokens) AS a (seq, token) ORDER BY seq) AS a
    ));
    RETURN QUERY
    SELECT (
        SELECT d.due_at FROM {schema}.dead AS d
        WHERE d.seq = a.seq AND d.queue + 0 = v_queue AND d.token = a.token AND d.due_at > v_now
    )
    FROM unnest(p_numbers, p_tokens) WITH ORDINALITY AS a (seq, token, place)
    ORDER BY a.place;
END
$$;

-- Complete messages and no more; return the numbers of those that it was done to.
CREATE OR REPLACE FUNCTION {schema}.complete_many(p_queue text, p_numbers bigint[], p_tokens bigint[]) RETURNS bigint[]
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_done bigint[];
    v_sessions text[];
    v_are_any boolean;
BEGIN
    WITH done AS (
        DELETE FROM {schema}.message AS m
        USING (SELECT * FROM unnest(p_numbers, p_tokens) AS a (seq, token) ORDER BY seq) AS a
        WHERE m.seq BETWEEN a.seq AND a.seq AND m.queue = (SELECT q.id FROM {schema}.queue AS q WHERE q.name = p_queue)
          AND m.state = 1 AND m.token = a.token
          AND (m.due_at > v_now OR {schema}._extended(m.seq, m.token, v_now) > v_now)
        RETURNING m.queue, m.seq, m.session
    )
    SELECT max(queue), array_agg(seq), array_agg(session), count(session) > 0
    INTO v_queue, v_done, v_sessions, v_are_any
    FROM done;
    IF v_done IS NOT NULL THEN
        INSERT INTO {schema}.tally (queue, locked) VALUES (v_queue, -cardinality(v_done));
        IF v_are_any THEN
            PERFORM {schema}._offer_late(v_queue, v_done, v_sessions, v_now);
        END IF;
    END IF;
    RETURN v_done;
END
$$;

-- Complete one message in the caller's own transaction; lock_token is the Message's. Raises TN002 if the lock is over,
-- so that what the transaction wrote for the message goes with it.
CREATE OR REPLACE FUNCTION {schema}.complete(queue text, lock_token text) RETURNS void
LANGUAGE plpgsql {plans} AS $$
BEGIN
    -- The caller may commit long after the lock has ended, and others have found the session to be held up.
    PERFORM {schema}._offer(m.queue, ARRAY[m.seq], ARRAY[m.session])
    FROM {schema}.message AS m
    WHERE m.seq = split_part(lock_token, '.', 2)::bigint AND m.session IS NOT NULL;
    IF {schema}.complete_many(
        queue, ARRAY[split_part(lock_token, '.', 2)::bigint], ARRAY[split_part(lock_token, '.', 1)::bigint]
    ) IS NULL THEN
        RAISE EXCEPTION 'the lock % on a message of % is over', lock_token, queue
            USING ERRCODE = 'TN002', HINT = 'Roll back: somebody else may have the message.';
    END IF;
END
$$;

-- Pass verdicts, one after the other; return for each 0 if its lock is over, 1 if it stands, 2 if the message died.
CREATE OR REPLACE FUNCTION {schema}.settle_many(
    p_queue text, p_numbers bigint[], p_tokens bigint[], p_verdicts text[], p_delays double precision[],
    p_reasons text[], p_descriptions text[], p_errors text[], p_remembers double precision[]
) RETURNS integer[]
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_most integer;
    v_now double precision := {schema}.clock();
    v_answers integer[] := '{}';
    v_message {schema}.message;
    v_answer integer;
    v_firsts bigint[] := '{}';
    v_sessions text[] := '{}';
BEGIN
    SELECT q.id, q.max_deliveries INTO v_queue, v_most FROM {schema}.queue AS q WHERE q.name = p_queue;
    FOR i IN 1 .. cardinality(p_numbers) LOOP
        SELECT * INTO v_message FROM {schema}.message
        WHERE seq = p_numbers[i] AND queue = v_queue AND state = 1 AND token = p_tokens[i]
          AND (due_at > v_now OR {schema}._extended(seq, token, v_now) > v_now)
        FOR UPDATE;
        IF NOT FOUND THEN
            v_answers := v_answers || 0;
            CONTINUE;
        END IF;
        v_answer := 1;
        CASE p_verdicts[i]
            WHEN 'complete' THEN
                DELETE FROM {schema}.message WHERE seq = v_message.seq;
                INSERT INTO {schema}.tally (queue, locked) VALUES (v_queue, -1);
                PERFORM {schema}._note(v_queue, coalesce(v_message.id, p_queue || '{id_mark}' || v_message.seq), v_now, p_remembers[i]);
            WHEN 'defer' THEN
                UPDATE {schema}.message SET state = 3, is_deferred = true, token = NULL, due_at = NULL
                WHERE seq = v_message.seq;
                INSERT INTO {schema}.tally (queue, locked, deferred) VALUES (v_queue, -1, 1);
            WHEN 'dead' THEN
                v_message.history :=
                    {schema}._remember(v_message.history, v_message.deliveries, v_now, 'rejected', p_errors[i]::jsonb);
                PERFORM {schema}._bury(v_message, p_reasons[i], p_descriptions[i], v_now);
            WHEN 'give back' THEN
                v_message.deliveries := v_message.deliveries - 1;
                v_answer := {schema}._put(v_message, 0, v_now);
            WHEN 'abandon' THEN
                v_message.history :=
                    {schema}._remember(v_message.history, v_message.deliveries, v_now, 'abandoned', p_errors[i]::jsonb);
                IF v_message.deliveries >= v_most THEN
                    PERFORM {schema}._bury(v_message, '{reason_tried}', {schema}._tried(v_message.deliveries), v_now);
                    v_answer := 2;
                ELSE
                    v_answer := {schema}._put(v_message, p_delays[i], v_now);
                END IF;
        END CASE;
        IF v_message.session IS NOT NULL THEN
            v_firsts := v_firsts || v_message.seq;
            v_sessions := v_sessions || v_message.session;
        END IF;
        v_answers := v_answers || v_answer;
    END LOOP;
    IF v_firsts <> '{}' THEN
        PERFORM {schema}._offer_late(v_queue, v_firsts, v_sessions, v_now);
    END IF;
    RETURN v_answers;
END
$$;

-- Put a locked message back, to be claimable after a delay, or deferred again if it was; 2 if its ttl has ended.
CREATE OR REPLACE FUNCTION {schema}._put(
    p_message {schema}.message, p_delay double precision, p_now double precision
) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_state integer := CASE WHEN p_message.is_deferred THEN 3 WHEN p_delay > 0 THEN 2 ELSE 0 END;
BEGIN
    IF v_state <> 3 AND p_message.expires_at <= p_now THEN
        PERFORM {schema}._bury(p_message, '{reason_expired}', {schema}._expired(), p_now);
        RETURN 2;
    END IF;
    UPDATE {schema}.message
    SET state = v_state,
        token = NULL,
        deliveries = p_message.deliveries,
        history = p_message.history,
        due_at = CASE v_state
            WHEN 3 THEN NULL
            WHEN 2 THEN least(p_now + p_delay, p_message.expires_at)
            ELSE p_message.expires_at
        END
    WHERE seq = p_message.seq;
    INSERT INTO {schema}.tally (queue, locked, ready, delayed, deferred)
    VALUES (p_message.queue, -1, (v_state = 0)::integer, (v_state = 2)::integer, (v_state = 3)::integer);
    IF v_state = 2 THEN
        PERFORM {schema}._lower_due(p_message.queue, 2, least(p_now + p_delay, p_message.expires_at));
    ELSIF v_state = 0 THEN
        PERFORM {schema}._lower(p_message.queue, {schema}._lows(
            CASE WHEN p_message.session IS NULL THEN ARRAY[p_message.priority] END,
            CASE WHEN p_message.session IS NULL THEN ARRAY[p_message.seq] END,
            p_message.expires_at, NULL, NULL
        ));
    END IF;
    RETURN 1;
END
$$;

-- Put a locked message back as if it had not been delivered.
CREATE OR REPLACE FUNCTION {schema}._take_back(p_message {schema}.message, p_now double precision) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    p_message.deliveries := p_message.deliveries - 1;
    IF {schema}._put(p_message, 0, p_now) = 2 THEN
        PERFORM {schema}._tell(jsonb_build_array(jsonb_build_array(
            p_message.seq, p_message.id, p_message.deliveries, '{reason_expired}'
        )));
    END IF;
END
$$;

-- Note in the inbox that a message was handled.
CREATE OR REPLACE FUNCTION {schema}._note(
    p_queue integer, p_id text, p_now double precision, p_remember double precision
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO {schema}.inbox AS known (queue, id, until)
    SELECT p_queue, p_id, p_now + p_remember WHERE p_remember > 0
    ON CONFLICT (queue, id) DO UPDATE SET until = greatest(known.until, excluded.until)
$$;

-- Pass verdicts on dead letters: they are removed, or stay.
CREATE OR REPLACE FUNCTION {schema}.settle_dead(
    p_queue text, p_numbers bigint[], p_tokens bigint[], p_verdicts text[], p_delays double precision[],
    p_reasons text[], p_descriptions text[], p_errors text[], p_remembers double precision[]
) RETURNS integer[]
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_answers integer[] := '{}';
    v_letter {schema}.dead;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    FOR i IN 1 .. cardinality(p_numbers) LOOP
        SELECT * INTO v_letter FROM {schema}.dead
        WHERE seq = p_numbers[i] AND queue + 0 = v_queue AND token = p_tokens[i] AND due_at > v_now
        FOR UPDATE;
        IF NOT FOUND THEN
            v_answers := v_answers || 0;
            CONTINUE;
        END IF;
        IF p_verdicts[i] = 'complete' THEN
            DELETE FROM {schema}.dead WHERE seq = v_letter.seq;
            INSERT INTO {schema}.tally (queue, dead) VALUES (v_queue, -1);
            PERFORM {schema}._note(v_queue, coalesce(v_letter.id, p_queue || '{id_mark}' || v_letter.seq), v_now, p_remembers[i]);
        ELSIF p_verdicts[i] = 'dead' THEN
            UPDATE {schema}.dead
            SET token = NULL, due_at = NULL, reason = p_reasons[i], description = p_descriptions[i], dead_at = v_now,
                history = {schema}._remember(history, deliveries, v_now, 'rejected', p_errors[i]::jsonb)
            WHERE seq = v_letter.seq;
        ELSE
            UPDATE {schema}.dead SET token = NULL, due_at = v_now + nullif(p_delays[i], 0) WHERE seq = v_letter.seq;
        END IF;
        v_answers := v_answers || 1;
    END LOOP;
    RETURN v_answers;
END
$$;

-- --- sessions ----------------------------------------------------------------------------------------------------

-- Note that sessions may be accepted for messages that were made claimable.
CREATE OR REPLACE FUNCTION {schema}._offer(p_queue integer, p_numbers bigint[], p_sessions text[]) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO {schema}.waiting (queue, seq, session)
    SELECT p_queue, min(a.seq), a.session FROM unnest(p_numbers, p_sessions) AS a (seq, session)
    WHERE a.session IS NOT NULL
    GROUP BY a.session
$$;

-- Note it for messages that were settled, if the lock of their session may have ended before this transaction does: while
-- it holds, the statement that lets go of the session notes it.
CREATE OR REPLACE FUNCTION {schema}._offer_late(
    p_queue integer, p_numbers bigint[], p_sessions text[], p_now double precision
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM unnest(p_sessions) AS a (name)
        WHERE a.name IS NOT NULL AND coalesce((
            SELECT CASE WHEN s.token IS NOT NULL THEN s.until END
            FROM {schema}.session AS s WHERE s.queue = p_queue AND s.name = a.name
        ), 0) < p_now + {late}
    ) THEN
        PERFORM {schema}._offer(p_queue, p_numbers, p_sessions);
    END IF;
END
$$;

-- Return the number of the first message of a session that can be claimed, or NULL: if none is ready, or one before it
-- was delivered and is not settled.
CREATE OR REPLACE FUNCTION {schema}._first(p_queue integer, p_session text) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    v_first bigint;
    v_back bigint;
BEGIN
    SELECT m.seq INTO v_first
    FROM {schema}.message AS m
    WHERE m.queue = p_queue AND m.session = p_session AND {schema}._turn(m.state, m.deliveries, m.is_deferred) = 0
    ORDER BY m.seq + 0
    LIMIT 1;
    SELECT m.seq INTO v_back
    FROM {schema}.message AS m
    WHERE m.queue = p_queue AND m.session = p_session AND {schema}._turn(m.state, m.deliveries, m.is_deferred) = 1
    ORDER BY m.seq + 0
    LIMIT 1;
    RETURN CASE WHEN v_back < v_first THEN NULL ELSE v_first END;
END
$$;

-- Let go of a session whose row is locked by this transaction, and offer it if it has a claimable message.
CREATE OR REPLACE FUNCTION {schema}._let_go(p_queue integer, p_session text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_seen tid[];
    v_first bigint;
BEGIN
    -- Only what was there before the look at the messages: another row may come of a message that was not seen.
    v_seen := ARRAY(
        SELECT w.ctid FROM {schema}.waiting AS w WHERE w.queue = p_queue AND w.session = p_session FOR UPDATE SKIP LOCKED
    );
    v_first := {schema}._first(p_queue, p_session);
    DELETE FROM {schema}.waiting WHERE ctid = ANY (v_seen);
    IF v_first IS NOT NULL THEN
        INSERT INTO {schema}.waiting (queue, seq, session) VALUES (p_queue, v_first, p_session);
    END IF;
    DELETE FROM {schema}.session WHERE queue = p_queue AND name = p_session AND state IS NULL AND token IS NULL;
END
$$;

-- Let go of the sessions whose locks have ended.
CREATE OR REPLACE FUNCTION {schema}._end_sessions(p_queue integer, p_now double precision) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_session text;
BEGIN
    FOR v_session IN
        SELECT s.name FROM {schema}.session AS s
        WHERE s.queue + 0 = p_queue AND s.token IS NOT NULL AND s.until + 0 <= p_now
        ORDER BY s.until + 0
        LIMIT 100
        FOR UPDATE SKIP LOCKED
    LOOP
        UPDATE {schema}.session SET token = NULL WHERE queue = p_queue AND name = v_session;
        PERFORM {schema}._let_go(p_queue, v_session);
    END LOOP;
END
$$;

-- Find the next session to accept, the one whose message has waited longest; its row is then locked, if it has one.
-- NULL if there is none. Sessions that another transaction is at are passed by.
CREATE OR REPLACE FUNCTION {schema}._next_session(p_queue integer, p_now double precision) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    v_after bigint := -1;
    v_session text;
    v_seen tid[];
    v_is_held boolean;
BEGIN
    FOR v_try IN 1 .. 200 LOOP
        SELECT w.seq, w.session INTO v_after, v_session
        FROM {schema}.waiting AS w
        WHERE w.queue = p_queue AND w.seq > v_after
        ORDER BY w.seq
        LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_seen := ARRAY(
            SELECT w.ctid FROM {schema}.waiting AS w
            WHERE w.queue = p_queue AND w.session = v_session
            FOR UPDATE SKIP LOCKED
        );
        CONTINUE WHEN cardinality(v_seen) = 0;
        -- With its row locked: else it may be let go meanwhile, by a transaction that doesn't see its messages yet.
        SELECT s.token IS NOT NULL AND s.until > p_now INTO v_is_held
        FROM {schema}.session AS s
        WHERE s.queue = p_queue AND s.name = v_session
        FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            CONTINUE WHEN EXISTS (SELECT FROM {schema}.session AS s WHERE s.queue = p_queue AND s.name = v_session);
            v_is_held := false;
        END IF;
        IF NOT v_is_held AND {schema}._first(p_queue, v_session) IS NOT NULL THEN
            DELETE FROM {schema}.waiting WHERE ctid = ANY (v_seen);
            RETURN v_session;
        END IF;
        DELETE FROM {schema}.waiting WHERE ctid = ANY (v_seen);
    END LOOP;
    RETURN NULL;
END
$$;

-- Lock a session, for NULL the free one whose message has waited longest. A row without name tells when to look again.
CREATE OR REPLACE FUNCTION {schema}.accept(
    p_queue text, p_session text, p_lock double precision, p_token bigint
) RETURNS TABLE (session text, locked_until double precision, state bytea)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer := {schema}._queue(p_queue);
    v_now double precision := {schema}.clock();
    v_session text := p_session;
BEGIN
    PERFORM {schema}._pass_time(v_queue, v_now, 10);
    PERFORM {schema}._end_sessions(v_queue, v_now);
    FOR v_try IN 1 .. 10 LOOP
        IF p_session IS NULL THEN
            v_session := {schema}._next_session(v_queue, v_now);
            EXIT WHEN v_session IS NULL;
        END IF;
        INSERT INTO {schema}.session AS s (queue, name, token, until)
        VALUES (v_queue, v_session, p_token, v_now + p_lock)
        ON CONFLICT (queue, name) DO UPDATE SET token = excluded.token, until = excluded.until
        WHERE s.token IS NULL OR s.until <= v_now
        RETURNING s.name, s.until, s.state INTO session, locked_until, state;
        IF FOUND THEN
            RETURN NEXT;
            RETURN;
        END IF;
        EXIT WHEN p_session IS NOT NULL;
    END LOOP;
    session := NULL;
    locked_until := least(
        {schema}._due_in(v_queue, v_now, {schema}._marks(v_queue)),
        (
            SELECT s.until - v_now FROM {schema}.session AS s
            WHERE s.queue + 0 = v_queue AND s.token IS NOT NULL AND s.until + 0 > v_now ORDER BY s.until + 0 LIMIT 1
        ),
        -- Another transaction is at a session, and nobody tells of its end.
        CASE WHEN p_session IS NULL AND EXISTS (SELECT FROM {schema}.waiting AS w WHERE w.queue = v_queue)
             THEN {look_again} END
    );
    RETURN NEXT;
END
$$;

-- Claim the next messages of a session, but none behind one that was delivered and is neither settled nor ours: it waits
-- for its delay to end, or it was another's whose lock is over, which need not stand in its row yet. Behind them comes a
-- row without number: its deliveries tell whether the session's lock holds (1) or is over (0), its locked_until the
-- seconds until something is due, its headers the deaths that were found.
CREATE OR REPLACE FUNCTION {schema}.receive_session(
    p_queue text, p_session text, p_token bigint, p_most integer
) RETURNS TABLE (
    seq bigint, id text, body bytea, headers text, deliveries integer, enqueued_at double precision,
    locked_until double precision, session text, priority smallint, reply_to text, correlation_id text
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_until double precision;
    v_places tid[];
    v_size bigint;
    v_found integer := 0;
BEGIN
    SELECT s.queue, s.until INTO v_queue, v_until
    FROM {schema}.session AS s
    WHERE s.queue = (SELECT q.id FROM {schema}.queue AS q WHERE q.name = p_queue)
      AND s.name = p_session AND s.token = p_token AND s.until > v_now
    FOR UPDATE;
    IF NOT FOUND THEN
        deliveries := 0;
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM {schema}._pass_time(v_queue, v_now, 10);
    SELECT array_agg(one.ctid), sum(one.size) INTO v_places, v_size
    FROM (
        SELECT ready.ctid, ready.size, sum(ready.size) OVER (ROWS UNBOUNDED PRECEDING) - ready.size AS before
        FROM (
            SELECT next.ctid, octet_length(next.body) AS size
            FROM {schema}.message AS next
            WHERE next.queue = v_queue AND next.session = p_session AND {schema}._turn(next.state, next.deliveries, next.is_deferred) = 0
              AND (next.expires_at IS NULL OR next.expires_at > v_now)
              AND next.seq + 0 < coalesce((
                  SELECT again.seq FROM {schema}.message AS again
                  WHERE again.queue = v_queue AND again.session = p_session
                    AND {schema}._turn(again.state, again.deliveries, again.is_deferred) = 1
                    AND again.token IS DISTINCT FROM p_token
                  ORDER BY again.seq + 0
                  LIMIT 1
              ), {int_max})
            ORDER BY next.seq + 0
            LIMIT p_most
            FOR UPDATE
        ) AS ready
    ) AS one
    WHERE one.before < {claim_bytes};
    IF v_places IS NOT NULL THEN
        RETURN QUERY
        UPDATE {schema}.message AS m
        SET state = 1, token = p_token, deliveries = m.deliveries + 1, due_at = v_until
        WHERE m.ctid = ANY (v_places)
        RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
            m.reply_to, m.correlation_id;
        v_found := cardinality(v_places);
        INSERT INTO {schema}.tally (queue, ready, locked) VALUES (v_queue, -v_found, v_found);
        PERFORM {schema}._lower_due(v_queue, 1, v_until);
    END IF;
    deliveries := 1;
    headers := {schema}._told();
    locked_until := CASE
        WHEN v_size >= {claim_bytes} THEN 0
        WHEN v_found < p_most THEN {schema}._due_in(v_queue, v_now, {schema}._marks(v_queue))
    END;
    RETURN NEXT;
END
$$;

-- Extend the locks of sessions, and of what is claimed under them; return their ends in order, NULL if over. As above,
-- nobody's transaction is waited for.
CREATE OR REPLACE FUNCTION {schema}.renew_sessions(
    p_queue text, p_sessions text[], p_tokens bigint[], p_lock double precision
) RETURNS SETOF double precision
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_until double precision;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    FOR i IN 1 .. cardinality(p_sessions) LOOP
        -- It may have waited for the row of another session, and be older than what has extended this one meanwhile.
        UPDATE {schema}.session SET until = greatest(until, v_now + p_lock)
        WHERE queue = v_queue AND name = p_sessions[i] AND token = p_tokens[i] AND until > v_now
        RETURNING until INTO v_until;
        IF FOUND THEN
            UPDATE {schema}.message SET due_at = greatest(due_at, v_until)
            WHERE ctid = ANY (ARRAY(
                SELECT held.ctid FROM {schema}.message AS held
                WHERE held.queue = v_queue AND held.session = p_sessions[i] AND held.token = p_tokens[i]
                  AND {schema}._turn(held.state, held.deliveries, held.is_deferred) = 1 AND held.state = 1
                FOR UPDATE SKIP LOCKED
            ));
            INSERT INTO {schema}.extended (seq, token, until)
            SELECT seq, token, v_until FROM {schema}.message
            WHERE queue = v_queue AND session = p_sessions[i] AND token = p_tokens[i] AND coalesce(due_at, 0) < v_until
              AND {schema}._turn(state, deliveries, is_deferred) = 1 AND state = 1
            ON CONFLICT (seq, token) DO UPDATE SET until = greatest(extended.until, excluded.until);
            RETURN NEXT v_until;
        ELSE
            RETURN NEXT NULL;
        END IF;
    END LOOP;
END
$$;

-- Unlock a session and give its messages back; false if its lock is over.
CREATE OR REPLACE FUNCTION {schema}.release_session(p_queue text, p_session text, p_token bigint) RETURNS boolean
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_message {schema}.message;
BEGIN
    UPDATE {schema}.session SET token = NULL, until = v_now
    WHERE queue = (SELECT q.id FROM {schema}.queue AS q WHERE q.name = p_queue)
      AND name = p_session AND token = p_token AND until > v_now
    RETURNING queue INTO v_queue;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    FOR v_message IN
        SELECT * FROM {schema}.message
        WHERE queue = v_queue AND session = p_session AND token = p_token
          AND {schema}._turn(state, deliveries, is_deferred) = 1 AND state = 1
        ORDER BY seq + 0
        FOR UPDATE
    LOOP
        PERFORM {schema}._take_back(v_message, v_now);
    END LOOP;
    PERFORM {schema}._let_go(v_queue, p_session);
    RETURN true;
END
$$;

-- Return whether a session's lock holds, and its state.
CREATE OR REPLACE FUNCTION {schema}.read_state(p_queue text, p_session text, p_token bigint) RETURNS SETOF bytea
LANGUAGE sql {plans} AS $$
    SELECT s.state
    FROM {schema}.session AS s JOIN {schema}.queue AS q ON q.id = s.queue
    WHERE q.name = p_queue AND s.name = p_session AND s.token = p_token AND s.until > {schema}.clock()
$$;

CREATE OR REPLACE FUNCTION {schema}.write_state(p_queue text, p_session text, p_token bigint, p_state bytea)
RETURNS SETOF boolean
LANGUAGE sql {plans} AS $$
    UPDATE {schema}.session AS s SET state = p_state
    FROM {schema}.queue AS q
    WHERE q.id = s.queue AND q.name = p_queue AND s.name = p_session AND s.token = p_token AND s.until > {schema}.clock()
    RETURNING true
$$;

-- --- looking on --------------------------------------------------------------------------------------------------

-- Count a queue's messages as they stood when what time does was last done, exactly and in a time that doesn't grow with
-- them.
CREATE OR REPLACE FUNCTION {schema}.counts(p_queue text) RETURNS TABLE (
    ready bigint, locked bigint, delayed bigint, deferred bigint, dead bigint, oldest_age double precision
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_keys double precision[];
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_keys := {schema}._marks(v_queue);
    PERFORM {schema}._sum_up(v_queue);
    SELECT sum(t.ready), sum(t.locked), sum(t.delayed), sum(t.deferred), sum(t.dead)
    INTO ready, locked, delayed, deferred, dead
    FROM {schema}.tally AS t
    WHERE t.queue = v_queue AND t.n >= v_keys[14]::bigint;
    SELECT greatest(0, v_now - m.enqueued_at) INTO oldest_age
    FROM (
        SELECT first.seq
        FROM generate_series(0, 9) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT m.seq FROM {schema}.message AS m
            WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = p.priority
              AND m.seq + 0 >= v_keys[1 + p.priority]::bigint
            ORDER BY m.seq + 0
            LIMIT 1
        ) AS first
        WHERE v_keys[1 + p.priority] < 'Infinity'
        UNION ALL (
            SELECT m.seq FROM {schema}.message AS m
            WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = 10
            ORDER BY m.seq + 0
            LIMIT 1
        )
        ORDER BY 1
        LIMIT 1
    ) AS oldest
    JOIN {schema}.message AS m ON m.seq BETWEEN oldest.seq AND oldest.seq;
    RETURN NEXT;
END
$$;

-- Count a queue's messages as they stand now. To be called from any language and driver.
CREATE OR REPLACE FUNCTION {schema}.stats(queue text) RETURNS TABLE (
    ready bigint, locked bigint, delayed bigint, deferred bigint, dead bigint, oldest_age double precision
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
BEGIN
    PERFORM {schema}._pass_time(q.id, {schema}.clock(), {rounds}) FROM {schema}.queue AS q WHERE q.name = stats.queue;
    RETURN QUERY SELECT * FROM {schema}.counts(stats.queue);
END
$$;

-- List the queues. One that was deleted is one again if a message was sent to it meanwhile.
CREATE OR REPLACE FUNCTION {schema}.names() RETURNS SETOF text
LANGUAGE sql {plans} AS $$
    SELECT q.name
    FROM {schema}.queue AS q
    WHERE q.deleted_at IS NULL OR EXISTS (
        SELECT FROM {schema}.tally AS t
        WHERE t.queue = q.id AND t.n >= (SELECT ({schema}._marks(q.id))[14]::bigint)
        GROUP BY t.queue
        HAVING sum(t.ready + t.locked + t.delayed + t.deferred + t.dead) <> 0
    )
    ORDER BY q.name
$$;

-- Make one row of a queue's tally, if there are many. Rows that another is at are left to them.
CREATE OR REPLACE FUNCTION {schema}._sum_up(p_queue integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_first bigint := ({schema}._marks(p_queue))[14]::bigint;
BEGIN
    IF (
        SELECT count(*) FROM (SELECT FROM {schema}.tally WHERE queue = p_queue AND n >= v_first LIMIT 50) AS found
    ) < 50 THEN
        RETURN;
    END IF;
    WITH old AS (
        DELETE FROM {schema}.tally
        WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {schema}.tally WHERE queue = p_queue AND n >= v_first LIMIT 20000 FOR UPDATE SKIP LOCKED
        ))
        RETURNING ready, locked, delayed, deferred, dead
    )
    INSERT INTO {schema}.tally (queue, ready, locked, delayed, deferred, dead)
    SELECT p_queue, sum(ready), sum(locked), sum(delayed), sum(deferred), sum(dead) FROM old HAVING count(*) > 0;
END
$$;

-- Keep house for a queue: sum up its tally, and forget the ids that need not be remembered any more.
CREATE OR REPLACE FUNCTION {schema}.tidy(queue text) RETURNS void
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = tidy.queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM {schema}._sum_up(v_queue);
    -- Make one row of what was lowered, which is as low and newer: senders in REPEATABLE READ leave one each.
    IF (
        SELECT count(*) FROM (SELECT FROM {schema}.mark AS m WHERE m.queue = v_queue AND m.kind = 0 LIMIT 50) AS found
    ) = 50 THEN
        WITH old AS (
            DELETE FROM {schema}.mark WHERE ctid = ANY (ARRAY(
                SELECT m.ctid FROM {schema}.mark AS m
                WHERE m.queue = v_queue AND m.kind = 0 ORDER BY m.n LIMIT 20000 FOR UPDATE SKIP LOCKED
            ))
            RETURNING keys
        )
        INSERT INTO {schema}.mark (queue, kind, keys)
        SELECT v_queue, 0, array_agg(low.key ORDER BY low.place)
        FROM (
            SELECT a.place, min(a.key) AS key
            FROM old CROSS JOIN LATERAL unnest(old.keys) WITH ORDINALITY AS a (key, place)
            GROUP BY a.place
        ) AS low
        HAVING count(*) > 0;
    END IF;
    DELETE FROM {schema}.sent WHERE ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.sent AS old
        WHERE old.queue = v_queue AND old.until <= v_now ORDER BY old.until LIMIT 20000 FOR UPDATE SKIP LOCKED
    ));
    DELETE FROM {schema}.inbox WHERE ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.inbox AS old
        WHERE old.queue = v_queue AND old.until <= v_now ORDER BY old.until LIMIT 20000 FOR UPDATE SKIP LOCKED
    ));
    DELETE FROM {schema}.extended WHERE ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.extended AS old WHERE old.until <= v_now LIMIT 20000 FOR UPDATE SKIP LOCKED
    ));
END
$$;

-- Show deferred messages.
CREATE OR REPLACE FUNCTION {schema}.peek_deferred(p_queue text, p_most integer, p_after bigint) RETURNS TABLE (
    seq bigint, id text, body bytea, headers text, deliveries integer, enqueued_at double precision,
    locked_until double precision, session text, priority smallint, reply_to text, correlation_id text
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    RETURN QUERY
    SELECT m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, 0::double precision, m.session, m.priority,
        m.reply_to, m.correlation_id
    FROM {schema}.message AS m
    WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = 11 AND m.seq + 0 > p_after
    ORDER BY m.seq + 0
    LIMIT p_most;
END
$$;

-- Return the numbers of the dead letters that fit every condition given, up to so many, the oldest first.
CREATE OR REPLACE FUNCTION {schema}._meant(
    p_queue integer, p_name text, p_numbers bigint[], p_ids text[], p_reason text, p_before double precision,
    p_after bigint, p_most integer, p_now double precision, p_locked boolean
) RETURNS SETOF bigint
LANGUAGE plpgsql {plans} AS $$
BEGIN
    RETURN QUERY
    SELECT d.seq
    FROM {schema}.dead AS d
    WHERE d.queue = p_queue
      AND d.seq > p_after
      AND (p_locked OR d.token IS NULL OR d.due_at <= p_now)
      AND (p_numbers IS NULL OR d.seq = ANY (p_numbers))
      AND (
          p_ids IS NULL OR coalesce(d.id, p_name || '{id_mark}' || d.seq) = ANY (p_ids)
          OR d.id IS NULL AND p_name || '$' || d.seq = ANY (p_ids)  -- as an older tenure calls it
      )
      AND (p_reason IS NULL OR d.reason = p_reason)
      AND (p_before IS NULL OR d.dead_at < p_before)
    ORDER BY d.seq
    LIMIT p_most;
END
$$;

-- Show dead letters.
CREATE OR REPLACE FUNCTION {schema}.peek_dead(
    p_queue text, p_numbers bigint[], p_ids text[], p_reason text, p_before double precision, p_after bigint,
    p_most integer
) RETURNS TABLE (
    seq bigint, id text, body bytea, headers text, deliveries integer, enqueued_at double precision,
    locked_until double precision, session text, priority smallint, reply_to text, correlation_id text,
    reason text, description text, dead_at double precision, history text
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    RETURN QUERY
    SELECT d.seq, d.id, d.body, d.headers, d.deliveries, d.enqueued_at, 0::double precision, d.session, d.priority,
        d.reply_to, d.correlation_id, d.reason, d.description, d.dead_at, d.history::text
    FROM {schema}._meant(
        v_queue, p_queue, p_numbers, p_ids, p_reason, p_before, p_after, p_most, {schema}.clock(), true
    ) AS meant (seq)
    JOIN {schema}.dead AS d ON d.seq BETWEEN meant.seq AND meant.seq
    ORDER BY meant.seq;
END
$$;

-- Put dead letters back into their queue, or (p_purge) remove them for good, or only count them (p_dry).
CREATE OR REPLACE FUNCTION {schema}.revive(
    p_queue text, p_numbers bigint[], p_ids text[], p_reason text, p_before double precision, p_after bigint,
    p_most integer, p_purge boolean, p_dry boolean
) RETURNS bigint
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_found bigint;
    v_priorities smallint[];
    v_numbers bigint[];
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    IF p_dry THEN
        RETURN (SELECT count(*) FROM {schema}._meant(
            v_queue, p_queue, p_numbers, p_ids, p_reason, p_before, p_after, p_most, v_now, false
        ));
    END IF;
    WITH gone AS (
        DELETE FROM {schema}.dead AS d
        USING {schema}._meant(
            v_queue, p_queue, p_numbers, p_ids, p_reason, p_before, p_after, p_most, v_now, false
        ) AS meant (seq)
        WHERE d.seq BETWEEN meant.seq AND meant.seq AND (d.token IS NULL OR d.due_at <= v_now)
        RETURNING d.*
    ), back AS (
        INSERT INTO {schema}.message (
            seq, queue, state, enqueued_at, priority, id, session, reply_to, correlation_id, headers, history, body
        )
        SELECT seq, queue, 0, enqueued_at, priority, id, session, reply_to, correlation_id, headers, history, body
        FROM gone
        WHERE NOT p_purge
    ), offered AS (
        INSERT INTO {schema}.waiting (queue, seq, session)
        SELECT v_queue, min(seq), session FROM gone WHERE session IS NOT NULL AND NOT p_purge GROUP BY session
    )
    SELECT count(*), array_agg(priority) FILTER (WHERE session IS NULL), array_agg(seq) FILTER (WHERE session IS NULL)
    INTO v_found, v_priorities, v_numbers
    FROM gone;
    IF v_found > 0 THEN
        IF NOT p_purge THEN
            PERFORM {schema}._lower(v_queue, {schema}._lows(v_priorities, v_numbers, NULL, NULL, NULL));
        END IF;
        INSERT INTO {schema}.tally (queue, ready, dead)
        VALUES (v_queue, CASE WHEN p_purge THEN 0 ELSE v_found END, -v_found);
    END IF;
    RETURN v_found;
END
$$;

-- --- the end of a queue ------------------------------------------------------------------------------------------

-- Delete a queue if it is empty, or by force; tell whether that is so, and what it held.
--
-- Its row stays for a day, marked, and is the queue's again if it is used again. So a transaction that was about to send
-- when the queue was deleted writes into no void: what it sends is there under the old number, which is still the name's.
CREATE OR REPLACE FUNCTION {schema}.delete_queue(p_queue text, p_force boolean) RETURNS TABLE (
    is_deleted boolean, ready bigint, locked bigint, delayed bigint, deferred bigint, dead bigint,
    oldest_age double precision
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT s.* INTO ready, locked, delayed, deferred, dead, oldest_age FROM {schema}.counts(p_queue) AS s;
    is_deleted := p_force OR coalesce(ready + locked + delayed + deferred + dead, 0) = 0;
    IF is_deleted AND p_force THEN  -- else nothing was there, and what has come since is to stay
        WITH gone AS (
            DELETE FROM {schema}.message AS m WHERE m.queue = v_queue RETURNING m.state
        )
        INSERT INTO {schema}.tally (queue, ready, locked, delayed, deferred)
        SELECT v_queue,
               -count(*) FILTER (WHERE state = 0), -count(*) FILTER (WHERE state = 1),
               -count(*) FILTER (WHERE state = 2), -count(*) FILTER (WHERE state = 3)
        FROM gone
        HAVING count(*) > 0;
        WITH gone AS (
            DELETE FROM {schema}.dead AS d WHERE d.queue = v_queue RETURNING d.seq
        )
        INSERT INTO {schema}.tally (queue, dead) SELECT v_queue, -count(*) FROM gone HAVING count(*) > 0;
        DELETE FROM {schema}.waiting AS w WHERE w.queue = v_queue;
    END IF;
    IF is_deleted THEN
        DELETE FROM {schema}.session AS s WHERE s.queue = v_queue;
        DELETE FROM {schema}.sent AS s WHERE s.queue = v_queue;
        DELETE FROM {schema}.inbox AS i WHERE i.queue = v_queue;
        UPDATE {schema}.queue
        SET lock = {lock}, max_deliveries = {max_deliveries}, dedupe_window = {dedupe_window}, body_max = {body_max},
            dead_retention = 'infinity', idle_at = NULL, deleted_at = {schema}.clock()
        WHERE id = v_queue;
    END IF;
    RETURN NEXT;
END
$$;

-- Note when a queue may be deleted if it is empty.
CREATE OR REPLACE FUNCTION {schema}.delete_when_idle(p_queue text, p_seconds double precision) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_queue integer := {schema}._queue(p_queue);
BEGIN
    UPDATE {schema}.queue SET idle_at = {schema}.clock() + p_seconds WHERE id = v_queue;
END
$$;

-- List queues that may be deleted. Those that were, and have not been used for a day, go for good.
CREATE OR REPLACE FUNCTION {schema}.idle() RETURNS SETOF text
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_now double precision := {schema}.clock();
    v_gone integer[];
BEGIN
    WITH gone AS (
        DELETE FROM {schema}.queue AS q
        WHERE q.deleted_at < v_now - 86400
          AND NOT EXISTS (
              SELECT FROM {schema}.tally AS t
              WHERE t.queue = q.id AND t.n >= (SELECT ({schema}._marks(q.id))[14]::bigint)
              GROUP BY t.queue
              HAVING sum(t.ready + t.locked + t.delayed + t.deferred + t.dead) <> 0
          )
        RETURNING q.id
    )
    SELECT array_agg(id) INTO v_gone FROM gone;
    IF v_gone IS NOT NULL THEN
        DELETE FROM {schema}.tally WHERE queue = ANY (v_gone);
        DELETE FROM {schema}.mark WHERE queue = ANY (v_gone);
    END IF;
    RETURN QUERY SELECT q.name::text FROM {schema}.queue AS q WHERE q.idle_at <= v_now ORDER BY q.idle_at LIMIT 100;
END
$$;

-- --- claims whose answer was lost --------------------------------------------------------------------------------

-- Give back, uncounted, what the claims with these tokens still hold; return the tokens of which something was found.
-- They were asked for p_ages seconds ago, for p_locks seconds: so only what is locked until about then is looked at, and
-- not all that is locked. (If the server's clock was set meanwhile, they are not found, and end by themselves.)
CREATE OR REPLACE FUNCTION {schema}.give_back(
    p_queue text, p_tokens bigint[], p_ages double precision[], p_locks double precision[]
) RETURNS bigint[]
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_found bigint[] := '{}';
    v_first record;
    v_message {schema}.message;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    FOR v_first IN
        SELECT a.token, first.due_at
        FROM unnest(p_tokens, p_ages, p_locks) AS a (token, age, lock)
        CROSS JOIN LATERAL (  -- all that a claim holds is locked until the same moment
            SELECT m.due_at FROM {schema}.message AS m
            WHERE m.queue = v_queue AND m.state = 1::smallint AND m.token = a.token AND m.due_at > v_now
              AND m.due_at >= v_now - a.age * 1.01 - 0.1 + a.lock AND m.due_at <= v_now + a.lock + 0.1
            ORDER BY m.due_at
            LIMIT 1
        ) AS first
    LOOP
        FOR v_message IN
            SELECT m.* FROM {schema}.message AS m
            WHERE m.queue = v_queue AND m.state = 1::smallint AND m.due_at = v_first.due_at AND m.token = v_first.token
            FOR UPDATE SKIP LOCKED
        LOOP
            v_found := v_found || v_message.token;
            PERFORM {schema}._take_back(v_message, v_now);
        END LOOP;
    END LOOP;
    RETURN v_found;
END
$$;

-- Give back, uncounted, what is claimed under a session's lock, which stays; but what is in the caller's hands.
CREATE OR REPLACE FUNCTION {schema}.give_back_session(p_queue text, p_session text, p_token bigint, p_kept bigint[])
RETURNS void
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_message {schema}.message;
BEGIN
    -- A claim that was given up and still runs has its row locked.
    SELECT s.queue INTO v_queue
    FROM {schema}.session AS s
    WHERE s.queue = (SELECT q.id FROM {schema}.queue AS q WHERE q.name = p_queue)
      AND s.name = p_session AND s.token = p_token AND s.until > v_now
    FOR UPDATE;
    FOR v_message IN
        SELECT m.* FROM {schema}.message AS m
        WHERE m.queue = v_queue AND m.session = p_session AND m.token = p_token
          AND {schema}._turn(m.state, m.deliveries, m.is_deferred) = 1 AND m.state = 1
          AND m.seq <> ALL (p_kept)
        ORDER BY m.seq + 0
        FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM {schema}._take_back(v_message, v_now);
    END LOOP;
END
$$;
