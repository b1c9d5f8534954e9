-- Claims of messages, and the return of claims whose answer was lost.

-- Return how many of these bodies one claim takes: the last one is the one that brings it to {claim_bytes} bytes.
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

-- Claim messages. The rows come in no order: to sort them here would cost more than it costs the client. A row without
-- number may come last: its locked_until is the seconds until something is due, its headers are the deaths that were found,
-- its priority tells whether the queue is limited (not NULL), and whether its limits keep ready messages back (1).
-- A claim ends with the body that brings it to {claim_bytes} bytes: then more may be claimable at once, which the client
-- concludes from the bodies.
--
-- Each transaction pays anew for each statement and each expression of a function, so there are few on the path of one
-- message.
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
    v_is_limited boolean;
    v_is_held_back boolean := false;
    v_most bigint := p_most;
    v_keys double precision[];
    v_found integer;
BEGIN
    -- Before the marks are read, so that this is one of the writers that raise_marks() waits for, or sees the proposal.
    LOCK TABLE ONLY {schema}.message IN ROW EXCLUSIVE MODE;
    SELECT q.id,
           -- As long as no mark was raised: from the beginning.
           least(coalesce(m.keys[1], 0), 9e18::double precision)::bigint,
           coalesce(m.keys[12], 0),
           least(m.keys[11], m.keys[13], 'Infinity'),
           m.keys IS NULL OR m.kind = 2 AND m.keys[2:10] = '{others}',
           (m.keys IS NULL OR m.kind <> 1 AND m.keys[12] <= v_now + p_lock)
               AND current_setting('transaction_isolation') = 'read committed',  -- otherwise it doesn't see proposals
           coalesce(m.keys, '{marks}'),
           q.paused OR num_nonnulls(q.max_locked, q.rate_count, q.session_rate_count) > 0
    INTO v_queue, v_first, v_unlocks, v_due, v_is_plain, v_is_covered, v_keys, v_is_limited
    FROM {schema}.queue AS q
    LEFT JOIN LATERAL (
        SELECT m.kind, m.keys FROM {schema}.mark AS m WHERE m.queue = q.id ORDER BY m.n DESC LIMIT 1
    ) AS m ON true
    WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    ELSIF v_is_limited THEN
        v_now := {schema}._lock_limits(v_queue);
        v_is_plain := false;
    ELSIF v_is_plain AND v_unlocks <= v_now AND v_due > v_now THEN
        v_is_plain := NOT EXISTS (
            SELECT FROM {schema}.message AS m
            WHERE m.queue = v_queue AND m.state = 1::smallint AND m.due_at >= v_unlocks AND m.due_at <= v_now
        );
    ELSIF v_is_plain AND v_due <= v_now THEN
        v_is_plain := NOT EXISTS (SELECT FROM {schema}._overdue(v_queue, v_now, v_keys));
    END IF;
    IF NOT v_is_plain THEN
        v_keys := {schema}._apply_due(v_queue, v_now, 10, {schema}._marks(v_queue));
        headers := {schema}._noted_deaths();
        IF v_is_limited THEN
            SELECT least(p_most, a.most) INTO v_most FROM {schema}._allowance(v_queue, v_now) AS a;
        END IF;
        RETURN QUERY
        UPDATE {schema}.message AS m
        SET state = 1, token = p_token, deliveries = least(m.deliveries, {count_max} - 1) + 1, due_at = v_now + p_lock
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
                    LIMIT v_most
                    FOR UPDATE SKIP LOCKED
                ) AS m
                WHERE v_keys[1 + p.priority] < 'Infinity'
                LIMIT v_most
            ) AS ready
        )::tid[])
        RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
            m.reply_to, m.correlation_id;
    ELSIF p_most > 1 THEN
        RETURN QUERY
        UPDATE {schema}.message AS m
        SET state = 1, token = p_token, deliveries = least(m.deliveries, {count_max} - 1) + 1, due_at = v_now + p_lock
        WHERE m.ctid = ANY ((
            SELECT CASE WHEN sum(ready.size) < {claim_bytes} THEN array_agg(ready.ctid)
                   ELSE (array_agg(ready.ctid))[:{schema}._fitting(array_agg(ready.size))] END
            FROM (
                SELECT m.ctid, octet_length(m.body) AS size
                FROM {schema}.message AS m
                WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = 0 AND m.seq + 0 >= v_first
                  AND (m.expires_at IS NULL OR m.expires_at > v_now)  -- more may have expired than were dead-lettered just now
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
        SET state = 1, token = p_token, deliveries = least(m.deliveries, {count_max} - 1) + 1, due_at = v_now + p_lock
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
    IF v_found = p_most AND v_is_covered AND headers IS NULL AND NOT v_is_limited THEN
        RETURN;  -- as nearly always under load
    ELSIF v_found > 0 AND NOT v_is_covered THEN
        PERFORM {schema}._lower_due(v_queue, 1, v_now + p_lock);
    END IF;
    IF v_is_limited THEN
        IF v_found > 0 THEN
            PERFORM {schema}._note_delivered(v_queue, NULL, v_now, v_found);
        END IF;
        v_is_held_back := v_found = v_most AND v_found < p_most AND {schema}._has_ready(v_queue, v_now, v_keys);
        priority := v_is_held_back::integer;
    END IF;
    IF v_found < p_most THEN
        IF v_found > 0 THEN
            v_keys[12] := least(v_keys[12], v_now + p_lock);
        END IF;
        locked_until := {schema}._due_in(v_queue, v_now, v_keys);
        IF v_is_held_back THEN
            SELECT least(locked_until, a.free_at - v_now) INTO locked_until FROM {schema}._allowance(v_queue, v_now) AS a;
        END IF;
        RETURN NEXT;
    ELSIF headers IS NOT NULL OR v_is_limited THEN
        RETURN NEXT;
    END IF;
END
$$;

-- Claim deferred messages by their numbers; if the queue is limited, the first ones that it allows. A row without number
-- comes last then, as from receive.
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
    v_is_limited boolean;
    v_most bigint;
    v_found integer;
BEGIN
    SELECT q.id, q.paused OR num_nonnulls(q.max_locked, q.rate_count, q.session_rate_count) > 0
    INTO v_queue, v_is_limited
    FROM {schema}.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    ELSIF v_is_limited THEN
        v_now := {schema}._lock_limits(v_queue);
    END IF;
    PERFORM {schema}._apply_due(v_queue, v_now, 10);
    IF v_is_limited THEN
        SELECT a.most INTO v_most FROM {schema}._allowance(v_queue, v_now) AS a;
    END IF;
    RETURN QUERY
    UPDATE {schema}.message AS m
    SET state = 1, token = p_token, deliveries = least(m.deliveries, {count_max} - 1) + 1, due_at = v_now + p_lock
    WHERE m.ctid = ANY (ARRAY(
        SELECT put_aside.ctid
        FROM (
            SELECT a.seq, min(a.place) AS place FROM unnest(p_numbers) WITH ORDINALITY AS a (seq, place)
            GROUP BY a.seq
            ORDER BY 2
        ) AS a
        CROSS JOIN LATERAL (
            SELECT m.ctid FROM {schema}.message AS m
            WHERE m.seq = a.seq AND m.queue = v_queue AND m.state = 3
            FOR UPDATE SKIP LOCKED
        ) AS put_aside
        ORDER BY a.place
        LIMIT v_most
    ))
    RETURNING m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, m.due_at, m.session, m.priority,
        m.reply_to, m.correlation_id;
    GET DIAGNOSTICS v_found = ROW_COUNT;
    IF v_found > 0 THEN
        INSERT INTO {schema}.tally (queue, deferred, locked) VALUES (v_queue, -v_found, v_found);
        PERFORM {schema}._lower_due(v_queue, 1, v_now + p_lock);
    END IF;
    IF v_is_limited THEN
        IF v_found > 0 THEN
            PERFORM {schema}._note_delivered(v_queue, NULL, v_now, v_found);
        END IF;
        priority := (v_found = coalesce(v_most, -1) AND EXISTS (
            SELECT FROM unnest(p_numbers) AS a (seq) JOIN {schema}.message AS m ON m.seq BETWEEN a.seq AND a.seq
            WHERE m.queue = v_queue AND m.state = 3
        ))::integer;
        RETURN NEXT;
    END IF;
END
$$;

-- Give back, uncounted, the messages that the claims with these tokens still hold; return the tokens that held any.
-- They were requested p_ages seconds ago, for p_locks seconds: so only messages that are locked until about then are looked
-- at, not all locked ones. (If the server's clock was set meanwhile, they are not found, and their locks run out.)
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
        CROSS JOIN LATERAL (  -- all messages of a claim are locked until the same moment
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
            PERFORM {schema}._undo_claim(v_message, v_now);
        END LOOP;
    END LOOP;
    RETURN v_found;
END
$$;
