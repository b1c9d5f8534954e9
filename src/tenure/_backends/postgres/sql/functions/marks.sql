-- Marks: where a queue's questions begin.

-- Under an open snapshot, consumed messages stay in the indexes, and a search for the first live entry walks past them
-- all. So searches begin at a mark, below which nothing is live. There are 14 for each queue: the first ready message by
-- priority (1 to 10), the first due_at by state (11 to 13), the first row of the tally (14).
--
-- Marks are raised in three steps, each a transaction: propose(), writers(), and raise_marks() when those writers have
-- ended. The rules are:
--
-- 1. A statement that makes something live below a mark that is raised or proposed leaves a row with it (_lower), after it
--    has written. Messages with new numbers and no priority need none: a proposed mark is a number that was given out
--    before. Infinity is a mark, too: nothing is live, and there is nothing to look for. A new queue begins with such.
-- 2. A transaction that wrote before it could see the proposal is one of those writers. When they have ended,
--    raise_marks() sees what they wrote, and raises no mark above it.

-- Return the marks of a queue.
CREATE OR REPLACE FUNCTION {schema}._marks(p_queue integer) RETURNS double precision[]
LANGUAGE plpgsql AS $$
DECLARE
    -- All of one snapshot: in a later one, marks may be raised, and the rows that lowered them be gone. A cursor reads
    -- row by row, and no further than to the marks that were raised last.
    c_marks CURSOR FOR SELECT m.kind, m.keys FROM {schema}.mark AS m WHERE m.queue = p_queue ORDER BY m.n DESC;
    v_kind smallint;
    v_keys double precision[];
    v_lowest double precision[];
BEGIN
    OPEN c_marks;
    LOOP
        FETCH c_marks INTO v_kind, v_keys;
        IF NOT FOUND THEN
            v_keys := '{marks}';
            v_kind := 2;
        END IF;
        IF v_lowest IS NULL AND v_kind <> 1 THEN
            v_lowest := v_keys;
        ELSIF v_kind <> 1 THEN
            v_lowest := ARRAY[
                least(v_keys[1], v_lowest[1]), least(v_keys[2], v_lowest[2]), least(v_keys[3], v_lowest[3]), least(v_keys[4], v_lowest[4]),
                least(v_keys[5], v_lowest[5]), least(v_keys[6], v_lowest[6]), least(v_keys[7], v_lowest[7]), least(v_keys[8], v_lowest[8]),
                least(v_keys[9], v_lowest[9]), least(v_keys[10], v_lowest[10]), least(v_keys[11], v_lowest[11]),
                least(v_keys[12], v_lowest[12]), least(v_keys[13], v_lowest[13]), least(v_keys[14], v_lowest[14])
            ];
        END IF;
        EXIT WHEN v_kind = 2;
    END LOOP;
    CLOSE c_marks;
    RETURN v_lowest;
END
$$;

-- Return the marks that messages need which were made ready, by priority and number, or which are due. NULL is nothing.
CREATE OR REPLACE FUNCTION {schema}._low_keys(
    p_priorities smallint[], p_numbers bigint[], p_expires double precision, p_unlocks double precision,
    p_appears double precision
) RETURNS double precision[]
LANGUAGE sql AS $$
    SELECT array_agg(coalesce(a.first, 'Infinity') ORDER BY a.priority)
        || ARRAY[coalesce(p_expires, 'Infinity'), coalesce(p_unlocks, 'Infinity'), coalesce(p_appears, 'Infinity')]
        || 'Infinity'::double precision
    FROM (
        SELECT p.priority, min(m.seq)::double precision AS first
        FROM generate_series(0, 9) AS p (priority)
        LEFT JOIN unnest(p_priorities, p_numbers) AS m (priority, seq) USING (priority)
        GROUP BY p.priority
    ) AS a
$$;

-- Note that something is live at p_lows, if a mark is or may be raised above it. To be called after it was written.
CREATE OR REPLACE FUNCTION {schema}._lower(p_queue integer, p_lows double precision[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_raised bigint;
    v_newest bigint;
BEGIN
    IF current_setting('transaction_isolation') = 'read committed' THEN  -- otherwise it doesn't see proposals
        SELECT m.n INTO v_raised
        FROM {schema}.mark AS m WHERE m.queue = p_queue AND m.kind = 2 ORDER BY m.n DESC LIMIT 1;
        SELECT max(m.n) INTO v_newest
        FROM (
            SELECT m.n, m.keys FROM {schema}.mark AS m
            WHERE m.queue = p_queue AND m.kind IN (1, 2) AND m.n >= coalesce(v_raised, 0)
            UNION ALL
            SELECT 0, '{marks}'::double precision[] WHERE v_raised IS NULL
        ) AS m
        WHERE EXISTS (SELECT FROM unnest(m.keys, p_lows) AS a (key, low) WHERE a.low < a.key);
        IF v_newest IS NULL OR EXISTS (
            SELECT FROM {schema}.mark AS m
            WHERE m.queue = p_queue AND m.kind = 0 AND m.n > v_newest
              AND NOT EXISTS (SELECT FROM unnest(m.keys, p_lows) AS a (key, low) WHERE a.low < a.key)
        ) THEN
            RETURN;
        END IF;
    END IF;
    INSERT INTO {schema}.mark (queue, kind, keys) VALUES (p_queue, 0, p_lows);
END
$$;

-- The same for one due_at of state p_state.
CREATE OR REPLACE FUNCTION {schema}._lower_due(p_queue integer, p_state integer, p_due double precision) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    c_marks CURSOR FOR SELECT m.kind, m.keys FROM {schema}.mark AS m WHERE m.queue = p_queue ORDER BY m.n DESC;
    v_place integer := 11 + p_state;
    v_lows double precision[];
    v_is_above boolean := p_state <> 1;  -- as long as no mark was raised
    v_is_covered boolean;
BEGIN
    IF p_due IS NULL THEN
        RETURN;
    ELSIF current_setting('transaction_isolation') = 'read committed' THEN
        SELECT m.kind <> 1 AND m.keys[v_place] <= p_due INTO v_is_covered
        FROM {schema}.mark AS m WHERE m.queue = p_queue ORDER BY m.n DESC LIMIT 1;
        IF v_is_covered OR NOT FOUND AND p_state = 1 THEN
            RETURN;
        END IF;
        FOR v_mark IN c_marks LOOP
            IF v_mark.kind = 0 THEN
                IF v_mark.keys[v_place] <= p_due THEN
                    RETURN;
                END IF;
            ELSE
                v_is_above := v_mark.keys[v_place] > p_due;
                EXIT WHEN v_is_above OR v_mark.kind = 2;
                v_is_above := p_state <> 1;
            END IF;
        END LOOP;
        IF NOT v_is_above THEN
            RETURN;
        END IF;
    END IF;
    v_lows := array_fill('Infinity'::double precision, '{14}');
    v_lows[v_place] := p_due;
    INSERT INTO {schema}.mark (queue, kind, keys) VALUES (p_queue, 0, v_lows);
END
$$;

-- Propose to raise the marks of a queue, of which messages up to p_number were received; return the proposal's number.
--
-- The mark of locks is raised no further than to the end of the next claims' locks, so that these need leave no rows;
-- unless p_looks_ahead, it stays seconds behind. The search for the first lock that holds walks past all settled ones:
-- that pays where claims ask for the next due time, and otherwise can wait until they are vacuumed.
CREATE OR REPLACE FUNCTION {schema}.propose(p_queue text, p_number bigint, p_looks_ahead boolean) RETURNS bigint
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_ends double precision;
    v_counted bigint;
    v_proposal bigint;
BEGIN
    SELECT q.id, {schema}.clock() + CASE WHEN p_looks_ahead THEN q.lock ELSE greatest(q.lock / 2, q.lock - {behind}) END
    INTO v_queue, v_ends
    FROM {schema}.queue AS q WHERE q.name = p_queue;
    INSERT INTO {schema}.tally (queue) VALUES (v_queue) RETURNING n INTO v_counted;
    INSERT INTO {schema}.mark (queue, kind, keys)
    VALUES (v_queue, 1, p_number || array_fill('Infinity'::double precision, '{10}') || ARRAY[v_ends, 'Infinity', v_counted])
    RETURNING n INTO v_proposal;
    RETURN v_proposal;
END
$$;

-- Return the transactions that write to queues just now.
CREATE OR REPLACE FUNCTION {schema}.writers() RETURNS text[]
LANGUAGE sql {path} AS $$
    SELECT coalesce(array_agg(DISTINCT virtualtransaction), '{}')
    FROM pg_locks
    WHERE locktype = 'relation' AND mode = 'RowExclusiveLock'
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND relation IN ('{schema}.message'::regclass, '{schema}.tally'::regclass)
$$;

-- Raise the marks as proposed, but above nothing that is live; false while one of the writers is open, NULL if another
-- proposal has replaced this one.
CREATE OR REPLACE FUNCTION {schema}.raise_marks(p_queue text, p_proposal bigint, p_writers text[]) RETURNS boolean
LANGUAGE plpgsql {plans} AS $$
DECLARE
    v_queue integer;
    v_proposed double precision[];
    v_keys double precision[];
    v_live double precision[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' OR {schema}.writers() && p_writers THEN
        RETURN false;
    END IF;
    SELECT q.id, m.keys INTO v_queue, v_proposed
    FROM {schema}.queue AS q JOIN {schema}.mark AS m ON m.queue = q.id
    WHERE q.name = p_queue AND m.n = p_proposal AND m.kind = 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('tenure marks {schema}', v_queue)) THEN
        RETURN false;  -- two that raise at once would wait for each other's rows
    END IF;
    v_keys := {schema}._marks(v_queue);
    SELECT array_agg(coalesce(first.key, 'Infinity') ORDER BY p.priority) INTO v_live
    FROM generate_series(0, 9) AS p (priority)
    LEFT JOIN LATERAL (
        SELECT m.seq::double precision AS key
        FROM {schema}.message AS m
        WHERE m.queue = v_queue AND {schema}._lane(m.state, m.session, m.priority) = p.priority
          AND m.seq + 0 >= CASE WHEN v_keys[1 + p.priority] < 'Infinity' THEN v_keys[1 + p.priority]::bigint ELSE {int_max} END
        ORDER BY m.seq + 0
        LIMIT 1
    ) AS first ON true;
    SELECT v_live || array_agg(coalesce(first.key, 'Infinity') ORDER BY s.state) INTO v_live
    FROM generate_series(0, 2) AS s (state)
    LEFT JOIN LATERAL (
        SELECT m.due_at AS key
        FROM {schema}.message AS m
        WHERE m.queue = v_queue AND m.state = s.state::smallint AND m.due_at >= v_keys[11 + s.state]
          AND m.due_at < v_proposed[11 + s.state]
        ORDER BY m.due_at
        LIMIT 1
    ) AS first ON true;
    v_live := v_live || coalesce((
        SELECT t.n::double precision FROM {schema}.tally AS t
        WHERE t.queue = v_queue AND t.n >= v_keys[14]::bigint ORDER BY t.n LIMIT 1
    ), 'Infinity');
    UPDATE {schema}.mark AS m
    SET kind = 2,
        keys = (SELECT array_agg(greatest(a.before, least(a.proposed, a.live)) ORDER BY a.place)
                FROM unnest(v_keys, m.keys, v_live) WITH ORDINALITY AS a (before, proposed, live, place))
    WHERE m.queue = v_queue AND m.n = p_proposal;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    DELETE FROM {schema}.mark AS m WHERE m.queue = v_queue AND m.n < p_proposal;
    RETURN true;
END
$$;
