-- Queues: their names, their beginning, their end.

-- Return a queue's number; the queue is created when it is first used, or used again after it was deleted.
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

-- Refuse a text that is no name of a queue.
CREATE OR REPLACE FUNCTION {schema}._check_name(p_name text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_name IS NULL OR p_name = '' OR length(p_name) > 200 OR strpos(p_name, '$') > 0 OR p_name <> btrim(p_name) THEN
        RAISE EXCEPTION 'a queue''s name has 1 to 200 characters, no $ and no space around it; % is none', p_name
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- Create a queue, if there is none of this name. Otherwise the first transaction that sends to it creates it, and others
-- that would be the first wait for its end.
CREATE OR REPLACE FUNCTION {schema}.declare(queue text) RETURNS void
LANGUAGE plpgsql {path} AS $$
BEGIN
    PERFORM {schema}._check_name(queue), {schema}._queue(queue);
END
$$;

-- Write some settings of a queue, or those among them that were never declared; return the settings that hold then.
CREATE OR REPLACE FUNCTION {schema}.declare_settings(
    p_queue text, p_settings text[], p_only_undeclared boolean, p_lock double precision, p_max_deliveries integer,
    p_dedupe_window double precision, p_body_max bigint, p_dead_retention double precision, p_max_locked bigint,
    p_rate_count bigint, p_rate_seconds double precision, p_session_rate_count bigint,
    p_session_rate_seconds double precision, p_paused boolean
) RETURNS TABLE (
    lock double precision, max_deliveries integer, dedupe_window double precision, body_max bigint,
    dead_retention double precision, max_locked bigint, rate_count bigint, rate_seconds double precision,
    session_rate_count bigint, session_rate_seconds double precision, paused boolean
)
LANGUAGE plpgsql {path} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer := {schema}._queue(p_queue);
    v_written text[];
BEGIN
    -- Of several that declare at the same time, one goes on, and the others find what it has declared.
    PERFORM FROM {schema}.queue AS q WHERE q.id = v_queue FOR NO KEY UPDATE;
    WITH noted AS (
        INSERT INTO {schema}.declared (queue, setting) SELECT v_queue, s.name FROM unnest(p_settings) AS s (name)
        ON CONFLICT DO NOTHING RETURNING setting
    )
    SELECT coalesce(array_agg(n.setting), '{}') INTO v_written FROM noted AS n;
    IF NOT p_only_undeclared THEN
        v_written := p_settings;
    END IF;
    RETURN QUERY
    UPDATE {schema}.queue AS q
    SET lock = CASE WHEN 'lock' = ANY (v_written) THEN p_lock ELSE q.lock END,
        max_deliveries = CASE WHEN 'max_deliveries' = ANY (v_written) THEN p_max_deliveries ELSE q.max_deliveries END,
        dedupe_window = CASE WHEN 'dedupe_window' = ANY (v_written) THEN p_dedupe_window ELSE q.dedupe_window END,
        body_max = CASE WHEN 'body_max' = ANY (v_written) THEN p_body_max ELSE q.body_max END,
        dead_retention = CASE WHEN 'dead_retention' = ANY (v_written) THEN p_dead_retention ELSE q.dead_retention END,
        max_locked = CASE WHEN 'max_locked' = ANY (v_written) THEN p_max_locked ELSE q.max_locked END,
        rate_count = CASE WHEN 'rate' = ANY (v_written) THEN p_rate_count ELSE q.rate_count END,
        rate_seconds = CASE WHEN 'rate' = ANY (v_written) THEN p_rate_seconds ELSE q.rate_seconds END,
        session_rate_count = CASE
            WHEN 'session_rate' = ANY (v_written) THEN p_session_rate_count ELSE q.session_rate_count
        END,
        session_rate_seconds = CASE
            WHEN 'session_rate' = ANY (v_written) THEN p_session_rate_seconds ELSE q.session_rate_seconds
        END,
        paused = CASE WHEN 'paused' = ANY (v_written) THEN p_paused ELSE q.paused END
    WHERE q.id = v_queue
    RETURNING q.lock, q.max_deliveries, q.dedupe_window, q.body_max, q.dead_retention, q.max_locked, q.rate_count,
        q.rate_seconds, q.session_rate_count, q.session_rate_seconds, q.paused;
END
$$;

-- Clients of releases without limits call it.
CREATE OR REPLACE FUNCTION {schema}.declare_settings(
    p_queue text, p_settings text[], p_only_undeclared boolean, p_lock double precision, p_max_deliveries integer,
    p_dedupe_window double precision, p_body_max bigint, p_dead_retention double precision
) RETURNS TABLE (
    lock double precision, max_deliveries integer, dedupe_window double precision, body_max bigint,
    dead_retention double precision
)
LANGUAGE sql {path} AS $$
    SELECT s.lock, s.max_deliveries, s.dedupe_window, s.body_max, s.dead_retention
    FROM {schema}.declare_settings(
        p_queue, p_settings, p_only_undeclared, p_lock, p_max_deliveries, p_dedupe_window, p_body_max, p_dead_retention,
        NULL, NULL, NULL, NULL, NULL, false
    ) AS s
$$;

-- List the queues. A deleted one is listed again if a message was sent to it meanwhile.
CREATE OR REPLACE FUNCTION {schema}.names() RETURNS SETOF text
LANGUAGE sql {plans} AS $$
    SELECT q.name
    FROM {schema}.queue AS q
    WHERE q.deleted_at IS NULL OR EXISTS (
        SELECT FROM {schema}.tally AS t
        WHERE t.queue = q.id AND t.n >= (SELECT ({schema}._marks(q.id))[14]::bigint)
        GROUP BY t.queue
        HAVING sum(t.ready::numeric + t.locked + t.delayed + t.deferred + t.dead) <> 0
    )
    ORDER BY q.name
$$;

-- Delete a queue if it is empty, or by force; return whether it was deleted, and what it held.
--
-- Its row stays for a day, marked, and serves again if the queue is used again. So a transaction that was about to send
-- when the queue was deleted loses nothing: its messages have the old number, which still belongs to the name.
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
    is_deleted := p_force OR coalesce(ready::numeric + locked + delayed + deferred + dead, 0) = 0;
    IF is_deleted AND p_force THEN  -- otherwise it was empty, and messages that have come since stay
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
        DELETE FROM {schema}.declared AS d WHERE d.queue = v_queue;
        DELETE FROM {schema}.schedule AS s WHERE s.queue = v_queue;
        DELETE FROM {schema}.delivered AS d WHERE d.queue = v_queue;
        UPDATE {schema}.queue
        SET lock = {lock}, max_deliveries = {max_deliveries}, dedupe_window = {dedupe_window}, body_max = {body_max},
            dead_retention = 'infinity', max_locked = NULL, rate_count = NULL, rate_seconds = NULL,
            session_rate_count = NULL, session_rate_seconds = NULL, paused = false,
            idle_at = NULL, deleted_at = {schema}.clock()
        WHERE id = v_queue;
    END IF;
    RETURN NEXT;
END
$$;

-- Note when a queue may be deleted if it is empty.
CREATE OR REPLACE FUNCTION {schema}.delete_when_idle(p_queue text, p_seconds double precision) RETURNS void
LANGUAGE plpgsql {path} AS $$
DECLARE
    v_queue integer := {schema}._queue(p_queue);
BEGIN
    UPDATE {schema}.queue SET idle_at = {schema}.clock() + p_seconds WHERE id = v_queue;
END
$$;

-- List queues that may be deleted. Rows of queues that were deleted, and not used for a day, are removed.
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
              HAVING sum(t.ready::numeric + t.locked + t.delayed + t.deferred + t.dead) <> 0
          )
        RETURNING q.id
    )
    SELECT array_agg(id) INTO v_gone FROM gone;
    IF v_gone IS NOT NULL THEN
        DELETE FROM {schema}.tally WHERE queue = ANY (v_gone);
        DELETE FROM {schema}.mark WHERE queue = ANY (v_gone);
        DELETE FROM {schema}.declared WHERE queue = ANY (v_gone);
        DELETE FROM {schema}.schedule WHERE queue = ANY (v_gone);
        DELETE FROM {schema}.delivered WHERE queue = ANY (v_gone);
    END IF;
    RETURN QUERY SELECT q.name::text FROM {schema}.queue AS q WHERE q.idle_at <= v_now ORDER BY q.idle_at LIMIT 100;
END
$$;
