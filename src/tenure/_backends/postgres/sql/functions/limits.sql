-- Limits of queues: how many messages a claim may bring.
--
-- A queue is limited if it is paused, or has max_locked, rate or session_rate. Claims on a limited queue go one after the
-- other: each counts what those before it have locked and delivered, and SKIP LOCKED hides the messages of a claim that is
-- not committed yet. Claims on other queues don't come here.
--
-- A rate is kept by a log, as in limits.py: deliveries that follow within a 64th of the rate's time share a row, and count
-- until the last of them is over. So no time of this length has more deliveries than the rate allows.

-- Let this transaction be the only one that claims on a limited queue, and return the time since when it is. The lock is not
-- one of a row: a consumer need not be allowed to change the queue, and neither declare_settings() nor delete_queue() has
-- to wait for it. Statements after this one see what the claims before it have committed.
CREATE OR REPLACE FUNCTION {schema}._lock_limits(p_queue integer) RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
    v_now double precision;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'a claim on a queue with limits needs the isolation level READ COMMITTED: otherwise it doesn''t see'
            ' what others have claimed'
            USING ERRCODE = 'invalid_transaction_state', HINT = 'Set default_transaction_isolation for this user.';
    END IF;
    -- Before the other lock: a migration that waits for this table must not come between two claims.
    LOCK TABLE ONLY {schema}.message IN ROW EXCLUSIVE MODE;
    PERFORM pg_advisory_xact_lock(hashtextextended('tenure limits {schema}', p_queue));
    v_now := {schema}.clock();
    -- After the clock was set back, what lies ahead counts as of now: otherwise it would count until the clock is there.
    UPDATE {schema}.delivered AS d SET began = least(d.began, v_now), at = v_now WHERE d.queue = p_queue AND d.at > v_now;
    RETURN v_now;
END
$$;

-- Return how many deliveries a rate allows after those of a log (NULL: any number), and if none, when it allows one.
CREATE OR REPLACE FUNCTION {schema}._allowed_by(
    p_count bigint, p_seconds double precision, p_queue integer, p_scope text, p_now double precision,
    OUT most bigint, OUT free_at double precision
)
LANGUAGE plpgsql AS $$
DECLARE
    v_left bigint;
BEGIN
    IF p_count IS NULL THEN
        RETURN;
    END IF;
    SELECT greatest(p_count - greatest(coalesce(sum(d.number), 0), 0), -{int_max}) INTO v_left
    FROM {schema}.delivered AS d
    WHERE d.queue = p_queue AND d.scope = p_scope AND d.at > p_now - p_seconds;
    most := greatest(v_left, 0);
    IF most = 0 THEN
        SELECT burst.at + p_seconds INTO free_at  -- if the rate was lowered, several must be over
        FROM (
            SELECT d.at, sum(d.number) OVER (ORDER BY d.at ROWS UNBOUNDED PRECEDING) AS over
            FROM {schema}.delivered AS d
            WHERE d.queue = p_queue AND d.scope = p_scope AND d.at > p_now - p_seconds
        ) AS burst
        WHERE v_left + burst.over > 0
        ORDER BY burst.at
        LIMIT 1;
    END IF;
END
$$;

-- Return how many messages the limits of a queue allow (NULL: any number); if none, when time alone allows one, apart from
-- the ends of locks.
CREATE OR REPLACE FUNCTION {schema}._allowance(
    p_queue integer, p_now double precision, OUT most bigint, OUT free_at double precision
)
LANGUAGE plpgsql AS $$
DECLARE
    v_is_paused boolean;
    v_max_locked bigint;
    v_places bigint;
    v_rows bigint;
    v_first bigint;
BEGIN
    SELECT q.paused, q.max_locked, a.most, a.free_at INTO v_is_paused, v_max_locked, most, free_at
    FROM {schema}.queue AS q
    CROSS JOIN LATERAL {schema}._allowed_by(q.rate_count, q.rate_seconds, q.id, '', p_now) AS a
    WHERE q.id = p_queue;
    IF v_is_paused THEN
        most := 0;
        free_at := NULL;
    ELSIF v_max_locked IS NOT NULL THEN
        v_first := ({schema}._marks(p_queue))[14]::bigint;
        SELECT {schema}._count_of(greatest(v_max_locked - coalesce(sum(t.locked), 0), 0)), count(*) INTO v_places, v_rows
        FROM {schema}.tally AS t
        WHERE t.queue = p_queue AND t.n >= v_first;
        IF v_rows >= 50 THEN
            PERFORM {schema}._sum_up(p_queue);
        END IF;
        IF v_places = 0 THEN
            free_at := NULL;
        END IF;
        most := least(most, v_places);
    END IF;
END
$$;

-- The same for the rate of one session.
CREATE OR REPLACE FUNCTION {schema}._session_allowance(
    p_queue integer, p_session text, p_now double precision, OUT most bigint, OUT free_at double precision
)
LANGUAGE sql AS $$
    SELECT a.most, a.free_at
    FROM {schema}.queue AS q
    CROSS JOIN LATERAL {schema}._allowed_by(
        q.session_rate_count, q.session_rate_seconds, q.id, '=' || p_session, p_now
    ) AS a
    WHERE q.id = p_queue
$$;

-- Note for the rates of a queue that messages were delivered, of a session or (NULL) by other claims. Nothing takes it back.
CREATE OR REPLACE FUNCTION {schema}._note_delivered(
    p_queue integer, p_session text, p_now double precision, p_number integer
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_log record;
BEGIN
    FOR v_log IN
        SELECT log.scope, log.seconds
        FROM {schema}.queue AS q
        CROSS JOIN LATERAL (
            VALUES ('', q.rate_seconds), ('=' || p_session, q.session_rate_seconds)
        ) AS log (scope, seconds)
        WHERE q.id = p_queue AND log.scope IS NOT NULL AND log.seconds IS NOT NULL
    LOOP
        UPDATE {schema}.delivered AS d SET at = p_now, number = least(d.number, {count_max}) + p_number
        WHERE d.ctid = ANY (ARRAY(
            SELECT last.ctid FROM {schema}.delivered AS last
            WHERE last.queue = p_queue AND last.scope = v_log.scope AND last.at > p_now - v_log.seconds
            ORDER BY last.at DESC
            LIMIT 1
        )) AND d.began > p_now - v_log.seconds / {parts};
        IF NOT FOUND THEN
            INSERT INTO {schema}.delivered (queue, scope, began, at, number)
            VALUES (p_queue, v_log.scope, p_now, p_now, p_number);
        END IF;
    END LOOP;
END
$$;

-- Return whether a queue has ready messages of no session. p_keys are the marks.
CREATE OR REPLACE FUNCTION {schema}._has_ready(
    p_queue integer, p_now double precision, p_keys double precision[]
) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM generate_series(0, 9) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT FROM {schema}.message AS m
            WHERE m.queue = p_queue AND {schema}._lane(m.state, m.session, m.priority) = p.priority
              AND m.seq + 0 >= p_keys[1 + p.priority]::bigint
              AND (m.expires_at IS NULL OR m.expires_at > p_now)
            ORDER BY m.seq + 0
            LIMIT 1
        ) AS first
        WHERE p_keys[1 + p.priority] < 'Infinity'
    );
END
$$;

-- Return the number of the next message that p_token may claim in a session, or NULL.
CREATE OR REPLACE FUNCTION {schema}._next_in_session(
    p_queue integer, p_session text, p_token bigint, p_now double precision
) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    RETURN (
        SELECT next.seq FROM {schema}.message AS next
        WHERE next.queue = p_queue AND next.session = p_session AND {schema}._turn(next.state, next.deliveries, next.is_deferred) = 0
          AND (next.expires_at IS NULL OR next.expires_at > p_now)
          AND next.seq + 0 < coalesce((
              SELECT again.seq FROM {schema}.message AS again
              WHERE again.queue = p_queue AND again.session = p_session
                AND {schema}._turn(again.state, again.deliveries, again.is_deferred) = 1
                AND again.token IS DISTINCT FROM p_token
              ORDER BY again.seq + 0
              LIMIT 1
          ), {int_max})
        ORDER BY next.seq + 0
        LIMIT 1
    );
END
$$;

-- Delay the next message of a session until the session's rate allows one, if it allows none now. Only a delivered message
-- holds up those behind it (_turn), so one that was not is counted as delivered until the delay ends: its token, which
-- no claim has, tells _apply_due() to take that off.
CREATE OR REPLACE FUNCTION {schema}._hold_up(
    p_queue integer, p_session text, p_number bigint, p_now double precision
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_due double precision;
BEGIN
    UPDATE {schema}.message AS m
    SET state = 2,
        due_at = least(a.free_at, p_now + {held_up_max}, m.expires_at),
        deliveries = greatest(m.deliveries, 1),
        token = CASE WHEN m.deliveries = 0 THEN {held_up} END
    FROM {schema}._session_allowance(p_queue, p_session, p_now) AS a
    WHERE m.seq BETWEEN p_number AND p_number AND m.state = 0 AND a.free_at > p_now
    RETURNING m.due_at INTO v_due;
    IF FOUND THEN
        INSERT INTO {schema}.tally (queue, ready, delayed) VALUES (p_queue, -1, 1);
        PERFORM {schema}._lower_due(p_queue, 2, v_due);
    END IF;
END
$$;

-- Return how many deliveries of a message count: one that _hold_up() has delayed is counted once too often meanwhile.
CREATE OR REPLACE FUNCTION {schema}._counted(p_state smallint, p_token bigint, p_deliveries integer) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_state = 2 AND p_token = {held_up} THEN greatest(p_deliveries, 1) - 1 ELSE p_deliveries END
$$;

-- Note that places of a queue with max_locked are free, until the transaction ends: the client reads this setting with the
-- answer of the statement, and notifies the consumers that wait for a place.
CREATE OR REPLACE FUNCTION {schema}._note_freed() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('tenure.freed', 'true', true);
END
$$;
