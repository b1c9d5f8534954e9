-- Keep one message, $2 to $5, that is ready at once and has no id of its own; return its number, or no row if no queue in
-- use has the name $1. It does the same as send_many(), in less time: that plans and calls more, and a sender waits for it.
-- Of the message, it returns the number alone: a role that only sends may read no more columns than send_many() returns.
-- name: send_one
WITH target AS (
    SELECT id FROM {schema}.queue WHERE name = $1 AND deleted_at IS NULL
), kept AS (
    INSERT INTO {schema}.message (queue, state, enqueued_at, priority, reply_to, correlation_id, headers, body)
    SELECT id, 0, {schema}.clock(), 0, $4, $5, $3, $2
    FROM target
    RETURNING seq
), counted AS (
    INSERT INTO {schema}.tally (queue, ready) SELECT id, 1 FROM target
)
SELECT seq FROM kept
