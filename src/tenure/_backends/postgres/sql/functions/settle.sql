-- Under a claim's lock: renewals and verdicts.

-- Extend locks; return their ends in the order of the request, NULL for those that are over. None ends sooner than
-- before, so no mark is above the new end that was not above the old one. A row that another transaction has locked, such
-- as the handler's own, is not waited for: the lock is extended in a row beside it. But only if the old end is farther
-- off than the client waits for the answer, so that a claim after the old end sees the new one.
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
    -- The locks of messages under a session's lock end with that, and are not extended by themselves.
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

-- Complete messages, and do no more; return the numbers of those that were completed. The setting tenure.freed tells
-- whether that has freed places of a queue with max_locked.
CREATE OR REPLACE FUNCTION {schema}.complete_many(p_queue text, p_numbers bigint[], p_tokens bigint[]) RETURNS bigint[]
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_done bigint[];
    v_sessions text[];
    v_are_any boolean;
    v_has_places boolean;
BEGIN
    WITH done AS (
        DELETE FROM {schema}.message AS m
        USING (SELECT * FROM unnest(p_numbers, p_tokens) AS a (seq, token) ORDER BY seq) AS a
        WHERE m.seq BETWEEN a.seq AND a.seq AND m.queue = (SELECT q.id FROM {schema}.queue AS q WHERE q.name = p_queue)
          AND m.state = 1 AND m.token = a.token
          AND (m.due_at > v_now OR {schema}._extended(m.seq, m.token, v_now) > v_now)
        RETURNING m.queue, m.seq, m.session
    )
    SELECT max(queue), array_agg(seq), array_agg(session), count(session) > 0,
           (SELECT q.max_locked IS NOT NULL FROM {schema}.queue AS q WHERE q.name = p_queue)
    INTO v_queue, v_done, v_sessions, v_are_any, v_has_places
    FROM done;
    IF v_done IS NOT NULL THEN
        INSERT INTO {schema}.tally (queue, locked) VALUES (v_queue, -cardinality(v_done));
        IF v_are_any THEN
            PERFORM {schema}._offer_late(v_queue, v_done, v_sessions, v_now);
        END IF;
        IF v_has_places THEN
            PERFORM {schema}._note_freed();
        END IF;
    END IF;
    RETURN v_done;
END
$$;

-- Complete one message in the caller's own transaction; lock_token is the Message's. Raises TN002 if the lock is over, so
-- that the transaction's writes are rolled back.
CREATE OR REPLACE FUNCTION {schema}.complete(queue text, lock_token text) RETURNS void
LANGUAGE plpgsql {plans} AS $$
BEGIN
    -- The caller may commit long after the lock has ended, when others have already found the session held up.
    PERFORM {schema}._offer(m.queue, ARRAY[m.seq], ARRAY[m.session])
    FROM {schema}.message AS m
    WHERE m.seq = split_part(lock_token, '.', 2)::bigint AND m.session IS NOT NULL;
    IF {schema}.complete_many(
        queue, ARRAY[split_part(lock_token, '.', 2)::bigint], ARRAY[split_part(lock_token, '.', 1)::bigint]
    ) IS NULL THEN
        RAISE EXCEPTION 'the lock % on a message of % is over', lock_token, queue
            USING ERRCODE = 'TN002', HINT = 'Roll back: another consumer may have the message.';
    END IF;
    -- Only consumers that wait for a place need a notification.
    PERFORM pg_notify('{schema}.hints', ':queue:' || q.name)
    FROM {schema}.queue AS q WHERE q.name = complete.queue AND q.max_locked IS NOT NULL;
END
$$;

-- Apply verdicts, one after the other; return for each 0 if the lock is over, 1 if it was applied, 2 if the message died.
-- tenure.freed is set as by complete_many.
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
    v_has_places boolean;
BEGIN
    SELECT q.id, q.max_deliveries, q.max_locked IS NOT NULL INTO v_queue, v_most, v_has_places
    FROM {schema}.queue AS q WHERE q.name = p_queue;
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
                PERFORM {schema}._remember_handled(v_queue, coalesce(v_message.id, p_queue || '{id_mark}' || v_message.seq), v_now, p_remembers[i]);
            WHEN 'defer' THEN
                UPDATE {schema}.message SET state = 3, is_deferred = true, token = NULL, due_at = NULL
                WHERE seq = v_message.seq;
                INSERT INTO {schema}.tally (queue, locked, deferred) VALUES (v_queue, -1, 1);
            WHEN 'dead' THEN
                v_message.history :=
                    {schema}._add_attempt(v_message.history, v_message.deliveries, v_now, 'rejected', p_errors[i]::jsonb);
                PERFORM {schema}._dead_letter(v_message, p_reasons[i], p_descriptions[i], v_now);
            WHEN 'give back' THEN
                v_message.deliveries := greatest(v_message.deliveries, 1) - 1;
                v_answer := {schema}._put_back(v_message, 0, v_now);
            WHEN 'abandon' THEN
                v_message.history :=
                    {schema}._add_attempt(v_message.history, v_message.deliveries, v_now, 'abandoned', p_errors[i]::jsonb);
                IF v_message.deliveries >= v_most THEN
                    PERFORM {schema}._dead_letter(v_message, '{reason_exhausted}', {schema}._exhausted(v_message.deliveries), v_now);
                    v_answer := 2;
                ELSE
                    v_answer := {schema}._put_back(v_message, p_delays[i], v_now);
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
    IF v_has_places AND 0 < ANY (v_answers) THEN
        PERFORM {schema}._note_freed();
    END IF;
    RETURN v_answers;
END
$$;

-- Note in the inbox that a message was handled.
CREATE OR REPLACE FUNCTION {schema}._remember_handled(
    p_queue integer, p_id text, p_now double precision, p_remember double precision
) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO {schema}.inbox AS known (queue, id, until)
    SELECT p_queue, p_id, p_now + p_remember WHERE p_remember > 0
    ON CONFLICT (queue, id) DO UPDATE SET until = greatest(known.until, excluded.until)
$$;
