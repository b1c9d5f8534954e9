-- Keep one message, $2 to $5, that is ready at once and has no id of its own; return its number, or no row if no queue in
-- use has the name $1. It does the same as send_many(), in less time: that plans and calls more, and a sender waits for it.
-- name: send_one
WITH kept AS (
    INSERT INTO {schema}.message (queue, state, enqueued_at, priority, reply_to, correlation_id, headers, body)
    SELECT id, 0, {schema}.clock(), 0, $4, $5, $3, $2
    FROM {schema}.queue
    WHERE name = $1 AND deleted_at IS NULL
    RETURNING seq, queue
), counted AS (
    INSERT INTO {schema}.tally (queue, ready) SELECT queue, 1 FROM kept
)
SELECT seq FROM kept
