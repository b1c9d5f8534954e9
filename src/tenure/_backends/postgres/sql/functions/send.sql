-- Sending.

-- Remember ids; return in their order which messages are to be kept: those without id, and the first with each id that was
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
        -- In the order of the ids, the same for all senders, so that no two wait for each other.
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
        -- All are ready, in their order, and no mark is above them: there is less to find out.
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
        SELECT a.*, coalesce(a.moment, v_now + a.delay, v_now) AS visible_at, v_now + a.expires_in AS expires_at
        FROM unnest(
            p_bodies, p_ids, p_headers, p_delays, p_moments, p_ttls, p_sessions, p_priorities, p_reply_tos,
            p_correlation_ids, v_fresh
        ) WITH ORDINALITY
            AS a (body, id, headers, delay, moment, expires_in, session, priority, reply_to, correlation_id, fresh, place)
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
        PERFORM {schema}._lower(v_queue, {schema}._low_keys(v_priorities, v_preferred, NULL, NULL, NULL));
    END IF;
    IF v_all > 0 THEN
        INSERT INTO {schema}.tally (queue, ready, delayed) VALUES (v_queue, v_ready, v_all - v_ready);
    END IF;
    RETURN coalesce(v_numbers, '{}');
END
$$;

-- A parameter of this function was renamed, and a function has to be dropped for that.
DO $$
BEGIN
    IF EXISTS (
        SELECT FROM pg_proc AS p WHERE p.pronamespace = to_regnamespace('{schema}') AND p.proname = 'send'
        AND 'ttl' = ANY (p.proargnames)
    ) THEN
        DROP FUNCTION {schema}.send;
    END IF;
END
$$;

-- Keep one message, in the caller's own transaction, and return its id. To be called from any language and driver.
CREATE OR REPLACE FUNCTION {schema}.send(
    queue text, body bytea, id text DEFAULT NULL, headers jsonb DEFAULT NULL, delay double precision DEFAULT 0,
    at timestamptz DEFAULT NULL, expires_in double precision DEFAULT NULL, session text DEFAULT NULL,
    priority integer DEFAULT 0, reply_to text DEFAULT NULL, correlation_id text DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql {path} AS $$
DECLARE
    v_numbers bigint[];
    v_most bigint;
BEGIN
    PERFORM {schema}._check_name(queue);
    IF priority NOT BETWEEN 0 AND 9 OR expires_in <= 0 OR delay < 0 OR body IS NULL THEN
        RAISE EXCEPTION 'priority must be 0 to 9, expires_in more than 0, delay at least 0, and body not NULL'
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
        ARRAY[extract(epoch FROM at)::double precision], ARRAY[expires_in], ARRAY[session], ARRAY[priority], ARRAY[reply_to],
        ARRAY[correlation_id]
    );
    -- PostgreSQL sends equal notifications of a transaction once.
    PERFORM pg_notify('{schema}.hints', ':queue:' || queue);
    RETURN coalesce(id, queue || '{id_mark}' || v_numbers[1]);
END
$$;
