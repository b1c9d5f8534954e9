-- The rules that all functions of queues keep to, and the indexes of messages that they need.

-- They work with the tables of version 4. One call of a function is one step: it is done as a whole, or not at all.
--
-- Parameters begin with p_, variables with v_. "v_now" is read once in each call.
-- The settings at their heads ("path", "plans") hold for what they call, too: so functions whose names begin with "_", which
-- clients don't call, need none. Both fix the search path, so that names are PostgreSQL's own. "plans" fixes the plans as
-- well: through each table there is one right way, by its index, also where a plan was made when the table was empty, and
-- it is full now.
--
-- Rows are joined by number as "m.seq BETWEEN a.seq AND a.seq". Joined by "=", the index would serve for its order as well:
-- with statistics of a moment with few messages, the planner then walks through all of the index, and so through all
-- messages that were consumed and are not vacuumed yet. "coalesce(due_at, 0)" keeps a condition from an index likewise.

-- Each index of a table costs each statement that writes to the table, also if it writes nothing into the index. So there
-- are four: by number, by due time, and these two.

-- Return the lane of a message that is not locked: 0 to 9 is its priority, 10 if it has a session, 11 if it is deferred.
CREATE OR REPLACE FUNCTION {schema}._lane(p_state smallint, p_session text, p_priority smallint) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE p_state WHEN 0 THEN CASE WHEN p_session IS NULL THEN p_priority ELSE 10 END WHEN 3 THEN 11 END
$$;

-- Return 0 for a claimable message, 1 for one that was delivered and is not settled: it holds up its session.
CREATE OR REPLACE FUNCTION {schema}._turn(p_state smallint, p_deliveries integer, p_is_deferred boolean) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN p_state = 0 THEN 0 WHEN p_state IN (1, 2) AND p_deliveries > 0 AND NOT p_is_deferred THEN 1 END
$$;

-- Only where they are missing: even a CREATE INDEX that finds its index waits for each transaction that has sent, and all
-- later sends and claims wait behind it. The lock of the last statement is taken first: otherwise there are deadlocks.
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
