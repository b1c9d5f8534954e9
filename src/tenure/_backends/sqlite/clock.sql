-- The statements that set the clock of a file back: to :right, :by seconds before the file's own time. Values that
-- another program has written in the place of a time are left alone.

-- name: ahead
SELECT (SELECT count(*) FROM tenure_message WHERE typeof(enqueued_at) = 'real' AND enqueued_at > :right),
       (SELECT count(*) FROM tenure_death WHERE typeof(dead_at) = 'real' AND dead_at > :right),
       (SELECT count(*) FROM tenure_dedupe WHERE typeof(sent_at) = 'real' AND sent_at > :right),
       (SELECT min(enqueued_at) FROM tenure_message WHERE typeof(enqueued_at) = 'real' AND enqueued_at > :right),
       (SELECT min(dead_at) FROM tenure_death WHERE typeof(dead_at) = 'real' AND dead_at > :right),
       (SELECT min(sent_at) FROM tenure_dedupe WHERE typeof(sent_at) = 'real' AND sent_at > :right);

-- name: shift_delays
UPDATE tenure_message SET due_at = due_at - :by
WHERE typeof(due_at) = 'real' AND due_at > :right AND (enqueued_at > :right OR deliveries > 0 OR queue % 2 = 1);

-- name: shift_expiries
UPDATE tenure_message SET expires_at = expires_at - :by
WHERE typeof(expires_at) = 'real' AND typeof(enqueued_at) = 'real' AND enqueued_at > :right;

-- name: shift_messages
UPDATE tenure_message SET enqueued_at = enqueued_at - :by
WHERE typeof(enqueued_at) = 'real' AND enqueued_at > :right;

-- name: shift_delayed
UPDATE OR REPLACE tenure_delayed
SET due_at = (SELECT one.due_at FROM tenure_message AS one WHERE one.sequence = tenure_delayed.sequence)
WHERE EXISTS (SELECT 1 FROM tenure_message AS one
              WHERE one.sequence = tenure_delayed.sequence AND typeof(one.due_at) = 'real'
                AND one.due_at = tenure_delayed.due_at - :by);

-- name: shift_expiry
UPDATE OR REPLACE tenure_expiry
SET expires_at = (SELECT one.expires_at FROM tenure_message AS one WHERE one.sequence = tenure_expiry.sequence)
WHERE EXISTS (SELECT 1 FROM tenure_message AS one
              WHERE one.sequence = tenure_expiry.sequence AND typeof(one.expires_at) = 'real'
                AND one.expires_at = tenure_expiry.expires_at - :by);

-- name: shift_deaths
UPDATE tenure_death SET dead_at = dead_at - :by WHERE typeof(dead_at) = 'real' AND dead_at > :right;

-- name: shift_sent_ids
UPDATE tenure_dedupe SET sent_at = sent_at - :by WHERE typeof(sent_at) = 'real' AND sent_at > :right;

-- What is over by the wrong clock stays so: an id that was handled in the wrong time would be remembered for years. One
-- that was handled before, and is to be remembered for longer than the clock was ahead, can't be told from one that was
-- handled later: it is forgotten that much earlier.
-- name: shift_handled_ids
DELETE FROM tenure_inbox WHERE typeof(until) = 'real' AND until > :right AND until <= :right + :by;

-- name: shift_later_handled_ids
UPDATE tenure_inbox SET until = until - :by WHERE typeof(until) = 'real' AND until > :right + :by;

-- One that was set before the wrong time can't be told from the others, and its process sets it anew within minutes.
-- name: shift_idle
UPDATE tenure_idle SET idle_at = max(idle_at - :by, :right + 600) WHERE typeof(idle_at) = 'real' AND idle_at > :right;

-- name: shift_holders
UPDATE tenure_hold SET since = since - :by WHERE typeof(since) = 'real' AND since > :right;

-- name: delivered_ahead
SELECT queue, session, bursts FROM tenure_delivered WHERE at > :right;

-- name: set_delivered
UPDATE tenure_delivered SET at = ?, bursts = ? WHERE queue = ? AND session = ?;
