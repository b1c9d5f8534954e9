-- The rules that all functions of queues keep to, and the indexes of messages that they need.

-- The functions of queues, beside the tables of version 4. One call of a function is one step: it stands or not.
--
-- Their names begin with p_ for what is given and v_ for what is found. "v_now" is read once in each call.
-- The settings at their heads keep plans from turning bad when a table that was planned for when empty is full: there
-- is one right way through each of them, by its index.
--
-- Rows are joined by number as "m.seq BETWEEN a.seq AND a.seq". Joined by "=", the index is of use for its order as well:
-- where the statistics are of a moment with few messages, the planner then walks through all of it, and so through all
-- that was consumed and is not vacuumed yet. "coalesce(due_at, 0)" keeps a condition from an index in the same way.

-- Each index of a table costs each statement that writes to it, also if it writes nothing into this one. So there are
-- four: by number, by what is due, and these two.

-- Return where a message stands that nobody has: 0 to 9 its priority, 10 if it is a session's, 11 if it is deferred.
CREATE OR REPLACE FUNCTION {schema}._lane(p_state smallint, p_session text, p_priority smallint) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE p_state WHEN 0 THEN CASE WHEN p_session IS NULL THEN p_priority ELSE 10 END WHEN 3 THEN 11 END
$$;

-- Return 0 for what can be claimed in a session, 1 for what was delivered and is not settled: it holds up the others.
CREATE OR REPLACE FUNCTION {schema}._turn(p_state smallint, p_deliveries integer, p_is_deferred boolean) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_state = 0 THEN 0 WHEN p_state IN (1, 2) AND p_deliveries > 0 AND NOT p_is_deferred THEN 1 END
$$;

-- Only where they are missing: even a CREATE INDEX that finds its index waits for each transaction that has sent, and all
-- who send or claim wait behind it. With the lock that the last statement needs from the first on: or there are deadlocks.
-- "seq + 0" is an order that no other index has, so that no plan takes another one.
DO $$
BEGIN
    IF to_regclass('{schema}.message_turn') IS NULL THEN
        LOCK TABLE {schema}.message IN ACCESS EXCLUSIVE MODE;
        CREATE INDEX message_order ON {schema}.message (queue, {schema}._lane(state, session, priority), (seq + 0))
            WHERE {schema}._lane(state, session, priority) IS NOT NULL;
        CREATE INDEX message_turn
            ON {schema}.message (queue, session, {schema}._turn(state, deliveries, is_deferred), (seq + 0))
            WHERE session IS NOT NULL AND {schema}._turn(state, deliveries, is_deferred) IS NOT NULL;
        DROP INDEX IF EXISTS {schema}.message_ready, {schema}.message_session_ready, {schema}.message_session,
            {schema}.message_session_next, {schema}.message_session_back, {schema}.message_deferred;
    END IF;
END
$$;
