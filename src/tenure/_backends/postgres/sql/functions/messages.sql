-- One message: its history, its death, its way back into the queue.

-- Add an attempt to a history, of which the newest {history_max} are kept. What is no history is dropped: another program
-- has written it, and an error would fail the whole statement, for all messages.
CREATE OR REPLACE FUNCTION {schema}._add_attempt(
    p_history jsonb, p_number integer, p_at double precision, p_outcome text, p_error jsonb
) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
            WHEN p_history IS NULL OR jsonb_typeof(p_history) <> 'array' THEN '[]'
            WHEN jsonb_array_length(p_history) = {history_max} THEN p_history - 0
            WHEN jsonb_array_length(p_history) > {history_max}
                THEN jsonb_path_query_array(p_history, '$[last - ({history_max} - 2) to last]')
            ELSE p_history
        END || jsonb_build_array(jsonb_build_array(p_number, p_at, p_outcome, p_error))
$$;

-- Move a locked message to the dead letters.
CREATE OR REPLACE FUNCTION {schema}._dead_letter(
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

CREATE OR REPLACE FUNCTION {schema}._exhausted(p_deliveries integer) RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT format('{exhausted_description}', p_deliveries) $$;

CREATE OR REPLACE FUNCTION {schema}._expired() RETURNS text
LANGUAGE sql IMMUTABLE AS $$ SELECT '{expired_description}' $$;

-- Note deaths that no answer to a verdict reports, as [[number, id, deliveries, reason], …], until the transaction ends:
-- the statement that has caused them returns them with its answer. Clients read the setting themselves.
CREATE OR REPLACE FUNCTION {schema}._note_deaths(p_died jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('tenure.died', (coalesce({schema}._noted_deaths(), '[]')::jsonb || p_died)::text, true);
END
$$;

CREATE OR REPLACE FUNCTION {schema}._noted_deaths() RETURNS text
LANGUAGE sql STABLE AS $$ SELECT nullif(current_setting('tenure.died', true), '') $$;

-- Clients of earlier releases call it.
CREATE OR REPLACE FUNCTION {schema}._told() RETURNS text
LANGUAGE sql STABLE AS $$ SELECT {schema}._noted_deaths() $$;

-- Return until when the lock of a claim holds beyond the end in its message's row, or NULL.
CREATE OR REPLACE FUNCTION {schema}._extended(p_seq bigint, p_token bigint, p_now double precision) RETURNS double precision
LANGUAGE sql STABLE AS $$
    SELECT until FROM {schema}.extended WHERE seq = p_seq AND token = p_token AND until > p_now
$$;

-- Put a locked message back, to be claimable after a delay, or deferred again if it was; 2 if it has expired.
CREATE OR REPLACE FUNCTION {schema}._put_back(
    p_message {schema}.message, p_delay double precision, p_now double precision
) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    v_state integer := CASE WHEN p_message.is_deferred THEN 3 WHEN p_delay > 0 THEN 2 ELSE 0 END;
BEGIN
    IF v_state <> 3 AND p_message.expires_at <= p_now THEN
        PERFORM {schema}._dead_letter(p_message, '{reason_expired}', {schema}._expired(), p_now);
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
        PERFORM {schema}._lower(p_message.queue, {schema}._low_keys(
            CASE WHEN p_message.session IS NULL THEN ARRAY[p_message.priority] END,
            CASE WHEN p_message.session IS NULL THEN ARRAY[p_message.seq] END,
            p_message.expires_at, NULL, NULL
        ));
    END IF;
    RETURN 1;
END
$$;

-- Put a locked message back as if it had not been delivered.
CREATE OR REPLACE FUNCTION {schema}._undo_claim(p_message {schema}.message, p_now double precision) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    p_message.deliveries := greatest(p_message.deliveries, 1) - 1;
    IF {schema}._put_back(p_message, 0, p_now) = 2 THEN
        PERFORM {schema}._note_deaths(jsonb_build_array(jsonb_build_array(
            p_message.seq, p_message.id, p_message.deliveries, '{reason_expired}'
        )));
    END IF;
END
$$;
