-- Sessions: the next to accept, claims under their locks, their state.

-- Offer sessions: note that they may be accepted, for messages that were made claimable.
CREATE OR REPLACE FUNCTION {schema}._offer(p_queue integer, p_numbers bigint[], p_sessions text[]) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO {schema}.waiting (queue, seq, session)
    SELECT p_queue, min(a.seq), a.session FROM unnest(p_numbers, p_sessions) AS a (seq, session)
    WHERE a.session IS NOT NULL
    GROUP BY a.session
$$;

-- Offer the sessions of settled messages, if the lock of a session may end before this transaction does: as long as it
-- holds, the statement that unlocks the session offers it.
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
CREATE OR REPLACE FUNCTION {schema}._first_claimable(p_queue integer, p_session text) RETURNS bigint
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

-- Unlock a session whose row is locked by this transaction, and offer it if it has a claimable message.
CREATE OR REPLACE FUNCTION {schema}._unlock_session(p_queue integer, p_session text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_seen tid[];
    v_first bigint;
BEGIN
    -- Only rows that were there before the look at the messages: a later row may be of a message that was not seen.
    v_seen := ARRAY(
        SELECT w.ctid FROM {schema}.waiting AS w WHERE w.queue = p_queue AND w.session = p_session FOR UPDATE SKIP LOCKED
    );
    v_first := {schema}._first_claimable(p_queue, p_session);
    DELETE FROM {schema}.waiting WHERE ctid = ANY (v_seen);
    IF v_first IS NOT NULL THEN
        INSERT INTO {schema}.waiting (queue, seq, session) VALUES (p_queue, v_first, p_session);
    END IF;
    DELETE FROM {schema}.session WHERE queue = p_queue AND name = p_session AND state IS NULL AND token IS NULL;
END
$$;

-- Unlock the sessions whose locks have ended.
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
        PERFORM {schema}._unlock_session(p_queue, v_session);
    END LOOP;
END
$$;

-- Find the next session to accept, the one whose message has waited longest; its row is then locked, if it has one.
-- NULL if there is none. Sessions whose rows another transaction has locked are skipped.
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
        -- With its row locked: otherwise a transaction that doesn't see its messages yet may unlock it meanwhile.
        SELECT s.token IS NOT NULL AND s.until > p_now INTO v_is_held
        FROM {schema}.session AS s
        WHERE s.queue = p_queue AND s.name = v_session
        FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            CONTINUE WHEN EXISTS (SELECT FROM {schema}.session AS s WHERE s.queue = p_queue AND s.name = v_session);
            v_is_held := false;
        END IF;
        IF NOT v_is_held AND {schema}._first_claimable(p_queue, v_session) IS NOT NULL THEN
            DELETE FROM {schema}.waiting WHERE ctid = ANY (v_seen);
            RETURN v_session;
        END IF;
        DELETE FROM {schema}.waiting WHERE ctid = ANY (v_seen);
    END LOOP;
    RETURN NULL;
END
$$;

-- Return whether a session could be accepted, if the limits of the queue allowed it. As _next_session, it looks at some.
CREATE OR REPLACE FUNCTION {schema}._has_session(p_queue integer, p_now double precision) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    RETURN EXISTS (
        SELECT FROM (
            SELECT w.session FROM {schema}.waiting AS w WHERE w.queue = p_queue ORDER BY w.seq LIMIT 200
        ) AS w
        WHERE NOT EXISTS (
            SELECT FROM {schema}.session AS s
            WHERE s.queue = p_queue AND s.name = w.session AND s.token IS NOT NULL AND s.until > p_now
        ) AND {schema}._first_claimable(p_queue, w.session) IS NOT NULL
    );
END
$$;

-- Lock a session, for NULL the free one whose message has waited longest. A row without name tells when to look again; it has
-- a state if a session is free and has messages waiting that the limits of the queue keep back.
CREATE OR REPLACE FUNCTION {schema}.accept(
    p_queue text, p_session text, p_lock double precision, p_token bigint
) RETURNS TABLE (session text, locked_until double precision, state bytea)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer := {schema}._queue(p_queue);
    v_now double precision := {schema}.clock();
    v_session text := p_session;
    v_most bigint;
    v_free_at double precision;
    v_is_held_back boolean := false;
BEGIN
    PERFORM {schema}._apply_due(v_queue, v_now, 10);
    PERFORM {schema}._end_sessions(v_queue, v_now);
    FOR v_try IN 1 .. 10 LOOP
        IF p_session IS NULL THEN
            SELECT a.most, a.free_at INTO v_most, v_free_at
            FROM {schema}.queue AS q CROSS JOIN LATERAL {schema}._allowance(q.id, v_now) AS a
            WHERE q.id = v_queue AND (q.paused OR num_nonnulls(q.max_locked, q.rate_count) > 0);
            IF v_most = 0 THEN  -- only read: what one consumer takes here, another one doesn't see
                v_is_held_back := {schema}._has_session(v_queue, v_now);
                v_free_at := CASE WHEN v_is_held_back THEN v_free_at END;
                EXIT;
            END IF;
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
    state := CASE WHEN v_is_held_back THEN '' END;
    locked_until := least(
        {schema}._due_in(v_queue, v_now, {schema}._marks(v_queue)),
        v_free_at - v_now,
        (
            SELECT s.until - v_now FROM {schema}.session AS s
            WHERE s.queue + 0 = v_queue AND s.token IS NOT NULL AND s.until + 0 > v_now ORDER BY s.until + 0 LIMIT 1
        ),
        -- Another transaction has locked a session's row, and its end is not notified.
        CASE WHEN p_session IS NULL AND v_most IS DISTINCT FROM 0 AND EXISTS (SELECT FROM {schema}.waiting AS w WHERE w.queue = v_queue)
             THEN {look_again} END
    );
    RETURN NEXT;
END
$$;

-- Claim the next messages of a session, but none behind one that was delivered and is neither settled nor held by p_token:
-- that one waits for its delay to end, or its lock is over, which its row need not show yet. A row without number comes
-- last: its deliveries tell whether the session's lock holds (1) or is over (0), its locked_until the
-- seconds until something is due, its headers the deaths that were found, its priority what it tells in receive, its
-- enqueued_at for how many seconds the rate of the session delays a message that waits in it.
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
    v_is_limited boolean;
    v_is_held_back boolean := false;
    v_most bigint := p_most;
    v_places tid[];
    v_size bigint;
    v_found integer := 0;
    v_next bigint;
    v_free_at double precision;
BEGIN
    SELECT q.id, s.until, q.paused OR num_nonnulls(q.max_locked, q.rate_count, q.session_rate_count) > 0
    INTO v_queue, v_until, v_is_limited
    FROM {schema}.queue AS q
    JOIN {schema}.session AS s ON s.queue = q.id
    WHERE q.name = p_queue AND s.name = p_session AND s.token = p_token AND s.until > v_now
    FOR UPDATE OF s;
    IF v_is_limited THEN  -- after the session's row, for which it may have to wait
        v_now := {schema}._lock_limits(v_queue);
    END IF;
    IF v_until IS NULL OR v_until <= v_now THEN
        deliveries := 0;
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM {schema}._apply_due(v_queue, v_now, 10);
    IF v_is_limited THEN
        SELECT least(p_most, a.most, mine.most) INTO v_most
        FROM {schema}._allowance(v_queue, v_now) AS a
        CROSS JOIN {schema}._session_allowance(v_queue, p_session, v_now) AS mine;
    END IF;
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
            LIMIT v_most
            FOR UPDATE
        ) AS ready
    ) AS one
    WHERE one.before < {claim_bytes};
    IF v_places IS NOT NULL THEN
        RETURN QUERY
        UPDATE {schema}.message AS m
        SET state = 1, token = p_token, deliveries = least(m.deliveries, {count_max} - 1) + 1, due_at = v_until
        WHERE m.ctid = ANY (v_places)
        RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
            m.reply_to, m.correlation_id;
        v_found := cardinality(v_places);
        INSERT INTO {schema}.tally (queue, ready, locked) VALUES (v_queue, -v_found, v_found);
        PERFORM {schema}._lower_due(v_queue, 1, v_until);
    END IF;
    IF v_is_limited THEN
        IF v_found > 0 THEN
            PERFORM {schema}._note_delivered(v_queue, p_session, v_now, v_found);
        END IF;
        v_next := {schema}._next_in_session(v_queue, p_session, p_token, v_now);
        IF v_next IS NOT NULL THEN
            PERFORM {schema}._hold_up(v_queue, p_session, v_next, v_now);
        END IF;
        SELECT mine.free_at INTO v_free_at  -- NULL if nothing waits for it
        FROM {schema}._session_allowance(v_queue, p_session, v_now) AS mine
        WHERE v_next IS NOT NULL OR EXISTS (
            SELECT FROM {schema}.message AS again
            WHERE again.queue = v_queue AND again.session = p_session
              AND {schema}._turn(again.state, again.deliveries, again.is_deferred) = 1
              AND again.token IS DISTINCT FROM p_token
        );
        v_is_held_back := v_found = v_most AND v_found < p_most AND num_nonnulls(v_next, v_free_at) > 0;
        priority := v_is_held_back::integer;
        enqueued_at := CASE WHEN v_free_at IS NOT NULL THEN least(v_free_at - v_now, {held_up_max}) END;
    END IF;
    deliveries := 1;
    headers := {schema}._noted_deaths();
    locked_until := CASE
        WHEN v_is_held_back AND v_free_at IS NOT NULL THEN enqueued_at
        WHEN v_is_held_back THEN least(
            {schema}._due_in(v_queue, v_now, {schema}._marks(v_queue)),
            (SELECT a.free_at - v_now FROM {schema}._allowance(v_queue, v_now) AS a)
        )
        WHEN v_size >= {claim_bytes} THEN 0
        WHEN v_found < p_most THEN {schema}._due_in(v_queue, v_now, {schema}._marks(v_queue))
    END;
    RETURN NEXT;
END
$$;

-- Extend the locks of sessions, and of the messages claimed under them; return their ends in order, NULL if over. As in
-- renew_many, no transaction is waited for.
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
        -- This statement may have waited for another session's row, and a newer one have extended this lock meanwhile.
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
        PERFORM {schema}._undo_claim(v_message, v_now);
    END LOOP;
    PERFORM {schema}._unlock_session(v_queue, p_session);
    RETURN true;
END
$$;

-- Give back, uncounted, the messages claimed under a session's lock, which stays; except p_kept, which the caller has.
CREATE OR REPLACE FUNCTION {schema}.give_back_session(p_queue text, p_session text, p_token bigint, p_kept bigint[])
RETURNS void
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_message {schema}.message;
BEGIN
    -- A claim that was given up and still runs has this row locked.
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
        PERFORM {schema}._undo_claim(v_message, v_now);
    END LOOP;
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
