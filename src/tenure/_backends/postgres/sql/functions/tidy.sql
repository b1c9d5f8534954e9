-- Sums and clean-up.

-- Return a sum of counts as a count, the largest there is if it is larger. A sender may have written any: an error would
-- end claims on a queue with max_locked, and the housekeeping of the queue.
CREATE OR REPLACE FUNCTION {schema}._count_of(p_sum numeric) RETURNS bigint
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$ SELECT least(greatest(p_sum, -{int_max}), {int_max})::bigint $$;

-- Make one row of a queue's tally, if there are many. Rows that another transaction has locked are skipped.
CREATE OR REPLACE FUNCTION {schema}._sum_up(p_queue integer) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_first bigint := ({schema}._marks(p_queue))[14]::bigint;
BEGIN
    IF (
        SELECT count(*) FROM (SELECT FROM {schema}.tally WHERE queue = p_queue AND n >= v_first LIMIT 50) AS found
    ) < 50 THEN
        RETURN;
    END IF;
    WITH old AS (
        DELETE FROM {schema}.tally
        WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {schema}.tally WHERE queue = p_queue AND n >= v_first LIMIT 20000 FOR UPDATE SKIP LOCKED
        ))
        RETURNING ready, locked, delayed, deferred, dead
    )
    INSERT INTO {schema}.tally (queue, ready, locked, delayed, deferred, dead)
    SELECT p_queue, {schema}._count_of(sum(ready)), {schema}._count_of(sum(locked)), {schema}._count_of(sum(delayed)),
           {schema}._count_of(sum(deferred)), {schema}._count_of(sum(dead))
    FROM old
    HAVING count(*) > 0;
END
$$;

-- Tidy a queue: sum up its tally, and forget ids and deliveries whose time is over.
CREATE OR REPLACE FUNCTION {schema}.tidy(queue text) RETURNS void
LANGUAGE plpgsql {plans} AS $$
#variable_conflict use_column
DECLARE
    v_queue integer;
    v_window double precision;
    v_now double precision := {schema}.clock();
BEGIN
    SELECT q.id, coalesce(greatest(q.rate_seconds, q.session_rate_seconds), 0) INTO v_queue, v_window
    FROM {schema}.queue AS q WHERE q.name = tidy.queue;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM {schema}._sum_up(v_queue);
    -- Make one row of many that lowered marks, as low as they and newer: senders in REPEATABLE READ leave one each.
    IF (
        SELECT count(*) FROM (SELECT FROM {schema}.mark AS m WHERE m.queue = v_queue AND m.kind = 0 LIMIT 50) AS found
    ) = 50 THEN
        WITH old AS (
            DELETE FROM {schema}.mark WHERE ctid = ANY (ARRAY(
                SELECT m.ctid FROM {schema}.mark AS m
                WHERE m.queue = v_queue AND m.kind = 0 ORDER BY m.n LIMIT 20000 FOR UPDATE SKIP LOCKED
            ))
            RETURNING keys
        )
        INSERT INTO {schema}.mark (queue, kind, keys)
        SELECT v_queue, 0, array_agg(low.key ORDER BY low.place)
        FROM (
            SELECT a.place, min(a.key) AS key
            FROM old CROSS JOIN LATERAL unnest(old.keys) WITH ORDINALITY AS a (key, place)
            GROUP BY a.place
        ) AS low
        HAVING count(*) > 0;
    END IF;
    DELETE FROM {schema}.sent WHERE ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.sent AS old
        WHERE old.queue = v_queue AND old.until <= v_now ORDER BY old.until LIMIT 20000 FOR UPDATE SKIP LOCKED
    ));
    DELETE FROM {schema}.inbox WHERE ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.inbox AS old
        WHERE old.queue = v_queue AND old.until <= v_now ORDER BY old.until LIMIT 20000 FOR UPDATE SKIP LOCKED
    ));
    DELETE FROM {schema}.extended WHERE ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.extended AS old WHERE old.until <= v_now LIMIT 20000 FOR UPDATE SKIP LOCKED
    ));
    DELETE FROM {schema}.process WHERE seen_at < v_now - 8 * 86400;  -- no lock is as long
    DELETE FROM {schema}.delivered WHERE ctid = ANY (ARRAY(
        SELECT old.ctid FROM {schema}.delivered AS old
        WHERE old.queue = v_queue AND old.at <= v_now - v_window ORDER BY old.at LIMIT 20000 FOR UPDATE SKIP LOCKED
    ));
END
$$;

-- Note the name of a process, for those who look at its locks.
CREATE OR REPLACE FUNCTION {schema}.note_process(p_origin bigint, p_name text) RETURNS void
LANGUAGE sql {path} AS $$
    INSERT INTO {schema}.process AS p (origin, name, seen_at) VALUES (p_origin, p_name, {schema}.clock())
    ON CONFLICT (origin) DO UPDATE SET name = excluded.name, seen_at = excluded.seen_at
$$;
