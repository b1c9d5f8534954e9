-- Schedules.

-- Return what is kept of the schedules of a queue, and the time; a row without a name if nothing is kept.
CREATE OR REPLACE FUNCTION {schema}.schedules(p_queue text) RETURNS TABLE (
    name text, record text, now double precision
)
LANGUAGE sql {plans} AS $$
    SELECT s.name, s.record, {schema}.clock()
    FROM (SELECT) AS x
    LEFT JOIN ({schema}.queue AS q JOIN {schema}.schedule AS s ON s.queue = q.id) ON q.name = p_queue
$$;

-- Keep p_record of a schedule if p_expected is kept, and p_not_before is over; then send messages, given as columns, as to
-- send_many. Return whether this was done, what is kept, and the time.
CREATE OR REPLACE FUNCTION {schema}.advance(
    p_queue text, p_schedule text, p_expected text, p_record text, p_not_before double precision,
    p_bodies bytea[], p_ids text[] DEFAULT NULL, p_headers text[] DEFAULT NULL,
    p_delays double precision[] DEFAULT NULL, p_moments double precision[] DEFAULT NULL,
    p_ttls double precision[] DEFAULT NULL, p_sessions text[] DEFAULT NULL, p_priorities integer[] DEFAULT NULL,
    p_reply_tos text[] DEFAULT NULL, p_correlation_ids text[] DEFAULT NULL
) RETURNS TABLE (is_done boolean, record text, now double precision)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer := {schema}._queue(p_queue);
BEGIN
    -- Of several at the same time, one goes on, and the others find what it has written.
    now := {schema}.clock();
    is_done := now >= p_not_before;
    IF is_done AND p_expected IS NULL AND p_record IS NOT NULL THEN
        INSERT INTO {schema}.schedule AS s (queue, name, record) VALUES (v_queue, p_schedule, p_record)
        ON CONFLICT DO NOTHING;
        is_done := FOUND;
    ELSIF is_done AND p_record IS NOT NULL THEN
        UPDATE {schema}.schedule AS s SET record = p_record
        WHERE s.queue = v_queue AND s.name = p_schedule AND s.record = p_expected;
        is_done := FOUND;
    ELSIF is_done AND p_expected IS NOT NULL THEN
        DELETE FROM {schema}.schedule AS s
        WHERE s.queue = v_queue AND s.name = p_schedule AND s.record = p_expected;
        is_done := FOUND;
    END IF;
    SELECT s.record INTO record FROM {schema}.schedule AS s WHERE s.queue = v_queue AND s.name = p_schedule;
    is_done := is_done AND record IS NOT DISTINCT FROM p_record;
    IF is_done AND cardinality(p_bodies) > 0 THEN
        PERFORM {schema}.send_many(
            p_queue, p_bodies, p_ids, p_headers, p_delays, p_moments, p_ttls, p_sessions, p_priorities, p_reply_tos,
            p_correlation_ids
        );
    END IF;
    now := {schema}.clock();  -- it may have waited for another transaction
    RETURN NEXT;
END
$$;
