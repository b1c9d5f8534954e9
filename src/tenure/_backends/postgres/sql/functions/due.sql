-- Due times: locks and delays that have ended, messages that have expired.

-- Apply what is due: end locks and delays, dead-letter exhausted and expired messages. Rows that other transactions have
-- locked are skipped. p_keys are the marks; return them as they are afterwards.
CREATE OR REPLACE FUNCTION {schema}._apply_due(
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
        -- It doesn't see locks that were extended since it began.
        v_ended := least(p_now, extract(epoch FROM transaction_timestamp()));
    END IF;
    SELECT max_deliveries INTO v_most FROM {schema}.queue WHERE id = p_queue;
    FOR v_round IN 1 .. p_rounds LOOP
        WITH due AS MATERIALIZED (
            SELECT m.seq,
                   m.state,
                   m.session,
                   m.state = 1 AND m.deliveries >= v_most AS is_exhausted,
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
        ), dying AS (
            DELETE FROM {schema}.message AS m USING due
            WHERE m.seq BETWEEN due.seq AND due.seq AND due.until IS NULL AND due.dies
            RETURNING m.*, due.is_exhausted, {schema}._counted(m.state, m.token, m.deliveries) AS counted
        ), dead_lettered AS (
            INSERT INTO {schema}.dead (
                seq, queue, enqueued_at, dead_at, deliveries, priority, id, session, reply_to, correlation_id, headers,
                reason, description, history, body
            )
            SELECT seq, queue, enqueued_at, p_now, counted, priority, id, session, reply_to, correlation_id, headers,
                   CASE WHEN is_exhausted THEN '{reason_exhausted}' ELSE '{reason_expired}' END,
                   CASE WHEN is_exhausted THEN {schema}._exhausted(deliveries) ELSE {schema}._expired() END,
                   CASE WHEN state = 1 THEN {schema}._add_attempt(history, deliveries, p_now, 'expired', NULL) ELSE history END,
                   body
            FROM dying
        ), returned AS (
            UPDATE {schema}.message AS m
            SET state = CASE WHEN m.is_deferred THEN 3 ELSE 0 END,
                token = NULL,
                deliveries = {schema}._counted(m.state, m.token, m.deliveries),
                due_at = CASE WHEN m.is_deferred THEN NULL ELSE m.expires_at END,
                history = CASE
                    WHEN m.state = 1 THEN {schema}._add_attempt(m.history, m.deliveries, p_now, 'expired', NULL)
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
                       seq, id, counted, CASE WHEN is_exhausted THEN '{reason_exhausted}' ELSE '{reason_expired}' END
                   ))
                   FROM dying
               )
        INTO v_found, v_unlocks, v_priorities, v_numbers, v_expires, v_died
        FROM ready AS r;
        IF v_died IS NOT NULL THEN
            PERFORM {schema}._note_deaths(v_died);
        END IF;
        IF v_found > 0 THEN
            PERFORM {schema}._lower(p_queue, {schema}._low_keys(v_priorities, v_numbers, v_expires, v_unlocks, NULL));
        END IF;
        EXIT WHEN v_found < 1000;
    END LOOP;
    RETURN {schema}._marks(p_queue);
END
$$;

CREATE OR REPLACE FUNCTION {schema}._apply_due(p_queue integer, p_now double precision, p_rounds integer) RETURNS void
LANGUAGE sql AS $$ SELECT {schema}._apply_due(p_queue, p_now, p_rounds, {schema}._marks(p_queue)) $$;

-- Apply a bounded part of what is due; return whether there may be more. A statement that applied all of it could reach
-- the server's time limit, and would then have done nothing.
CREATE OR REPLACE FUNCTION {schema}.catch_up(p_queue text) RETURNS boolean
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_keys double precision[];
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    v_keys := {schema}._apply_due(v_queue, v_now, {rounds}, {schema}._marks(v_queue));
    IF NOT EXISTS (SELECT FROM {schema}._overdue(v_queue, v_now, v_keys)) THEN
        RETURN false;
    END IF;
    PERFORM FROM {schema}.message AS m
    WHERE m.queue = v_queue AND m.due_at <= v_now AND m.state <= 2
    ORDER BY m.due_at
    LIMIT 1
    FOR UPDATE SKIP LOCKED;  -- rows that others have locked are left to them
    RETURN FOUND;
END
$$;

-- Return the states in which something is due.
CREATE OR REPLACE FUNCTION {schema}._overdue(
    p_queue integer, p_now double precision, p_keys double precision[]
) RETURNS SETOF smallint
LANGUAGE sql STABLE AS $$  -- so that the planner inlines it
    SELECT s.state
    FROM (VALUES (1::smallint, p_keys[12]), (2::smallint, p_keys[13]), (0::smallint, p_keys[11])) AS s (state, key)
    CROSS JOIN LATERAL (
        SELECT FROM {schema}.message AS m
        WHERE m.queue = p_queue AND m.state = s.state AND m.due_at >= s.key AND m.due_at <= p_now
        LIMIT 1
    ) AS first
    WHERE s.key <= p_now
$$;

-- Return in how many seconds the next message comes due, or NULL if none will. An overdue one was left to another
-- transaction, whose end is not notified (or too many were overdue): then it is time to look again soon.
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
