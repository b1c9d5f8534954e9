-- Counts, and a look at deferred messages.

-- Count a queue's messages in the states that were last applied, exactly, and in a time that doesn't grow with them.
CREATE OR REPLACE FUNCTION {schema}.counts(p_queue text) RETURNS TABLE (
    ready bigint, locked bigint, delayed bigint, deferred bigint, dead bigint, oldest_age double precision
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_now double precision := {schema}.clock();
    v_keys double precision[];
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    v_keys := {schema}._marks(v_queue);
    PERFORM {schema}._sum_up(v_queue);
    SELECT {schema}._count_of(sum(t.ready)), {schema}._count_of(sum(t.locked)), {schema}._count_of(sum(t.delayed)),
           {schema}._count_of(sum(t.deferred)), {schema}._count_of(sum(t.dead))
    INTO ready, locked, delayed, deferred, dead
    FROM {schema}.tally AS t
    WHERE t.queue = v_queue AND t.n >= v_keys[14]::bigint;
    SELECT greatest(0, v_now - m.enqueued_at) INTO oldest_age
    FROM (
        SELECT first.seq
        FROM generate_series(0, 9) AS p (priority)
        CROSS JOIN LATERAL (
            SELECT m.seq FROM {schema}.message AS m
            WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = p.priority
              AND m.seq + 0 >= v_keys[1 + p.priority]::bigint
            ORDER BY m.seq + 0
            LIMIT 1
        ) AS first
        WHERE v_keys[1 + p.priority] < 'Infinity'
        UNION ALL (
            SELECT m.seq FROM {schema}.message AS m
            WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = 10
            ORDER BY m.seq + 0
            LIMIT 1
        )
        ORDER BY 1
        LIMIT 1
    ) AS oldest
    JOIN {schema}.message AS m ON m.seq BETWEEN oldest.seq AND oldest.seq;
    RETURN NEXT;
END
$$;

-- Count a queue's messages as they stand now. To be called from any language and driver.
CREATE OR REPLACE FUNCTION {schema}.stats(queue text) RETURNS TABLE (
    ready bigint, locked bigint, delayed bigint, deferred bigint, dead bigint, oldest_age double precision
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
BEGIN
    PERFORM {schema}._apply_due(q.id, {schema}.clock(), {rounds}) FROM {schema}.queue AS q WHERE q.name = stats.queue;
    RETURN QUERY SELECT * FROM {schema}.counts(stats.queue);
END
$$;

-- Show deferred messages.
CREATE OR REPLACE FUNCTION {schema}.peek_deferred(p_queue text, p_most integer, p_after bigint) RETURNS TABLE (
    seq bigint, id text, body bytea, headers text, deliveries integer, enqueued_at double precision,
    locked_until double precision, session text, priority smallint, reply_to text, correlation_id text
)
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
BEGIN
    SELECT q.id INTO v_queue FROM {schema}.queue AS q WHERE q.name = p_queue;
    RETURN QUERY
    SELECT m.seq, m.id, m.body, m.headers, m.deliveries, m.enqueued_at, 0::double precision, m.session, m.priority,
        m.reply_to, m.correlation_id
    FROM {schema}.message AS m
    WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = 11 AND m.seq + 0 > p_after
    ORDER BY m.seq + 0
    LIMIT p_most;
END
$$;
