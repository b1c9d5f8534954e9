-- Dead letters: claims, verdicts, and steps over many of them.

-- Claim dead letters. Their histories count for the size of a claim, too.
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
    PERFORM {schema}._apply_due(v_queue, v_now, 10);
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

-- Apply verdicts to dead letters: they are removed, or stay.
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
            PERFORM {schema}._remember_handled(v_queue, coalesce(v_letter.id, p_queue || '{id_mark}' || v_letter.seq), v_now, p_remembers[i]);
        ELSIF p_verdicts[i] = 'dead' THEN
            UPDATE {schema}.dead
            SET token = NULL, due_at = NULL, reason = p_reasons[i], description = p_descriptions[i], dead_at = v_now,
                history = {schema}._add_attempt(history, greatest(deliveries, 1), v_now, 'rejected', p_errors[i]::jsonb)
            WHERE seq = v_letter.seq;
        ELSE
            UPDATE {schema}.dead SET token = NULL, due_at = v_now + nullif(p_delays[i], 0) WHERE seq = v_letter.seq;
        END IF;
        v_answers := v_answers || 1;
    END LOOP;
    RETURN v_answers;
END
$$;

-- Return the numbers of the dead letters that fit every given condition, up to p_most, the oldest first.
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
          OR d.id IS NULL AND p_name || '$' || d.seq = ANY (p_ids)  -- as earlier releases made it up
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
    ) AS selected (seq)
    JOIN {schema}.dead AS d ON d.seq BETWEEN selected.seq AND selected.seq
    ORDER BY selected.seq;
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
    IF p_purge THEN  -- by itself: the one statement below needs the right to insert messages even if it inserts none
        DELETE FROM {schema}.dead AS d
        USING {schema}._meant(
            v_queue, p_queue, p_numbers, p_ids, p_reason, p_before, p_after, p_most, v_now, false
        ) AS selected (seq)
        WHERE d.seq BETWEEN selected.seq AND selected.seq AND (d.token IS NULL OR d.due_at <= v_now);
        GET DIAGNOSTICS v_found = ROW_COUNT;
        IF v_found > 0 THEN
            INSERT INTO {schema}.tally (queue, ready, dead) VALUES (v_queue, 0, -v_found);
        END IF;
        RETURN v_found;
    END IF;
    WITH gone AS (
        DELETE FROM {schema}.dead AS d
        USING {schema}._meant(
            v_queue, p_queue, p_numbers, p_ids, p_reason, p_before, p_after, p_most, v_now, false
        ) AS selected (seq)
        WHERE d.seq BETWEEN selected.seq AND selected.seq AND (d.token IS NULL OR d.due_at <= v_now)
        RETURNING d.*
    ), back AS (
        INSERT INTO {schema}.message (
            seq, queue, state, enqueued_at, priority, id, session, reply_to, correlation_id, headers, history, body
        )
        SELECT seq, queue, 0, enqueued_at, priority, id, session, reply_to, correlation_id, headers, history, body
        FROM gone
    ), offered AS (
        INSERT INTO {schema}.waiting (queue, seq, session)
        SELECT v_queue, min(seq), session FROM gone WHERE session IS NOT NULL GROUP BY session
    )
    SELECT count(*), array_agg(priority) FILTER (WHERE session IS NULL), array_agg(seq) FILTER (WHERE session IS NULL)
    INTO v_found, v_priorities, v_numbers
    FROM gone;
    IF v_found > 0 THEN
        PERFORM {schema}._lower(v_queue, {schema}._low_keys(v_priorities, v_numbers, NULL, NULL, NULL));
        INSERT INTO {schema}.tally (queue, ready, dead) VALUES (v_queue, v_found, -v_found);
    END IF;
    RETURN v_found;
END
$$;
