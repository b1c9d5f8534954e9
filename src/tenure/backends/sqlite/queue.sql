-- What is asked of the tables of queues. Times: "now" counts since this boot, "wall" in Unix seconds.

-- name: clock
SELECT origin, sequence, boot, ahead, seen FROM tenure_queue_clock;

-- name: set_clock
UPDATE tenure_queue_clock SET sequence = ?1, boot = ?2, ahead = ?3, seen = ?4;

-- name: boots
SELECT boot FROM tenure_queue_clock UNION SELECT DISTINCT boot FROM tenure_hold;

-- name: queue
SELECT queue, name, max_deliveries, dedupe_window FROM tenure_queue WHERE name = ?1;

-- name: queue_of
SELECT queue, name, max_deliveries, dedupe_window FROM tenure_queue WHERE queue = ?1;

-- name: names
SELECT name FROM tenure_queue WHERE queue % 2 = 0 ORDER BY name;

-- name: settings
SELECT lock, max_deliveries, dedupe_window, body_max, coalesce(seconds, 9e999)
FROM tenure_queue LEFT JOIN tenure_dead_retention USING (queue)
WHERE name = ?1;

-- name: declare
UPDATE tenure_queue SET lock = ?2, max_deliveries = ?3, dedupe_window = ?4, body_max = ?5 WHERE name = ?1;

-- name: create_queue
INSERT INTO tenure_queue (queue, name, lock, max_deliveries, dedupe_window, body_max) VALUES (?1, ?2, ?3, ?4, ?5, ?6);

-- name: newest_queue
SELECT coalesce(max(queue), -1) FROM tenure_queue;

-- name: any_queue
SELECT queue FROM tenure_queue
WHERE queue >= (SELECT abs(random() % (max(queue) + 1)) FROM tenure_queue) AND queue % 2 = 0
ORDER BY queue LIMIT 1;

-- name: count
UPDATE tenure_queue
SET ready = ready + ?2, locked = locked + ?3, delayed = delayed + ?4, deferred = deferred + ?5
WHERE queue = ?1;

-- name: counts
SELECT live.queue, live.ready, live.locked, live.delayed, live.deferred,
       dead.ready + dead.locked + dead.delayed
FROM tenure_queue AS live
JOIN tenure_queue AS dead ON dead.queue = live.queue | 1
WHERE live.name = ?1;

-- name: oldest
WITH ranks (rank) AS (VALUES (0), (-1), (-2), (-3), (-4), (-5), (-6), (-7), (-8), (-9)),
firsts (sequence) AS (
    SELECT (SELECT min(sequence) FROM tenure_ready WHERE queue = ?1 AND session = '' AND rank = ranks.rank) FROM ranks
    UNION ALL SELECT (SELECT min(first) FROM tenure_session WHERE queue = ?1 AND is_free = 0 AND first IS NOT NULL)
    UNION ALL SELECT (SELECT min(first) FROM tenure_session WHERE queue = ?1 AND is_free = 1 AND first IS NOT NULL)
)
SELECT enqueued_at FROM tenure_message WHERE sequence = (SELECT min(sequence) FROM firsts);

-- What time will bring next, or has brought. Each is the first entry of an index.
-- name: alarms
SELECT (SELECT min(due_at) FROM tenure_delayed WHERE queue = ?1),
       (SELECT min(until) FROM tenure_hold WHERE queue = ?1 AND boot = ?2),
       (SELECT min(expires_at) FROM tenure_expiry WHERE queue = ?1),
       EXISTS (SELECT 1 FROM tenure_hold WHERE queue = ?1 AND boot < ?2)
       OR EXISTS (SELECT 1 FROM tenure_hold WHERE queue = ?1 AND boot > ?2);

-- name: expired_holds
SELECT token, part, session, was_deferred, sequences
FROM tenure_hold
WHERE queue = ?1 AND boot = ?2 AND until <= ?3
ORDER BY until LIMIT 1;

-- name: stamp_foreign_holds
UPDATE tenure_hold SET until = ?3 + lock, boot = ?2 WHERE queue = ?1 AND boot <> ?2;

-- name: stamp_late_holds
UPDATE tenure_hold SET until = ?2 + lock WHERE boot = ?1 AND until > ?2 + lock;

-- name: due
SELECT sequence, due_at FROM tenure_delayed WHERE queue = ?1 AND due_at <= ?2 ORDER BY due_at, sequence LIMIT ?3;

-- name: expired
SELECT sequence, expires_at FROM tenure_expiry WHERE queue = ?1 AND expires_at <= ?2 ORDER BY expires_at LIMIT ?3;

-- name: insert_message
INSERT INTO tenure_message (sequence, queue, deliveries, enqueued_at, priority, id, headers, session, due_at,
                            expires_at, reply_to, correlation_id, history, body)
VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?);

-- name: insert_plain
INSERT INTO tenure_message (queue, enqueued_at, deliveries, priority, sequence, body)
VALUES (?1, ?2, 0, 0, ?, ?);

-- name: ready_range
INSERT INTO tenure_ready (queue, session, rank, sequence)
SELECT queue, coalesce(session, ''), iif(session IS NULL, -priority, 0), sequence
FROM tenure_message
WHERE sequence BETWEEN ?1 AND ?2 AND due_at IS NULL;

-- name: insert_ready
INSERT INTO tenure_ready (queue, session, rank, sequence) VALUES (?1, ?2, ?3, ?4);

-- name: delete_ready
DELETE FROM tenure_ready WHERE queue = ?1 AND session = ?2 AND rank = ?3 AND sequence = ?4;

-- name: insert_delayed
INSERT INTO tenure_delayed (queue, due_at, sequence, session) VALUES (?1, ?2, ?3, ?4);

-- name: delete_delayed
DELETE FROM tenure_delayed WHERE queue = ?1 AND due_at = ?2 AND sequence = ?3;

-- name: insert_expiry
INSERT INTO tenure_expiry (queue, expires_at, sequence) VALUES (?1, ?2, ?3);

-- name: delete_expiry
DELETE FROM tenure_expiry WHERE queue = ?1 AND expires_at = ?2 AND sequence = ?3;

-- name: insert_deferred
INSERT INTO tenure_deferred (queue, sequence) VALUES (?1, ?2);

-- name: delete_deferred
DELETE FROM tenure_deferred WHERE queue = ?1 AND sequence = ?2;

-- CROSS JOIN fixes the order: from the short list to the messages.
-- name: claimable
SELECT message.sequence, id, body, headers, deliveries, enqueued_at, message.session, priority, reply_to,
       correlation_id, expires_at, ready.rank
FROM tenure_ready AS ready CROSS JOIN tenure_message AS message ON message.sequence = ready.sequence
WHERE ready.queue = ?1 AND ready.session = ?2
ORDER BY ready.rank, ready.sequence
LIMIT ?3;

-- name: take_ready
DELETE FROM tenure_ready WHERE queue = ?1 AND session = ?2 AND (rank, sequence) <= (?3, ?4);

-- name: message
SELECT sequence, id, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id, expires_at, 0
FROM tenure_message WHERE sequence = ?1;

-- name: standing
SELECT deliveries, priority, session, due_at, expires_at, history FROM tenure_message WHERE sequence = ?1;

-- name: set_standing
UPDATE tenure_message SET deliveries = ?2, history = ?3 WHERE sequence = ?1;

-- name: set_due
UPDATE tenure_message SET due_at = ?2 WHERE sequence = ?1;

-- name: revive
UPDATE tenure_message SET deliveries = 0, due_at = NULL, expires_at = NULL WHERE sequence = ?1;

-- name: delete_messages
DELETE FROM tenure_message WHERE sequence BETWEEN ? AND ?;

-- name: insert_hold
INSERT INTO tenure_hold (token, part, queue, session, was_deferred, boot, until, lock, sequences)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9);

-- name: holds
SELECT part, queue, session, was_deferred,
       -- Of another boot, or farther off than it can be: it is waited out anew.
       CASE WHEN boot <> ?2 THEN ?3 + lock ELSE min(until, ?3 + lock) END, lock, sequences
FROM tenure_hold
WHERE token = ?1 AND (boot <> ?2 OR until > ?3)
ORDER BY part;

-- name: newest_part
SELECT max(part) FROM tenure_hold WHERE token = ?1;

-- name: keep_in_hold
UPDATE tenure_hold SET sequences = ?3 WHERE token = ?1 AND part = ?2;

-- name: renew_hold
UPDATE tenure_hold SET boot = ?3, until = ?4, lock = ?5 WHERE token = ?1 AND part = ?2;

-- name: delete_hold
DELETE FROM tenure_hold WHERE token = ?1 AND part = ?2;

-- name: hold_of_session
SELECT 1 FROM tenure_hold WHERE queue = ?1 AND session = ?2;

-- name: first_in_session
SELECT min(sequence) FROM tenure_ready WHERE queue = ?1 AND session = ?2 AND rank = 0;

-- name: blocking_in_session
SELECT min(sequence) FROM tenure_delayed WHERE queue = ?1 AND session = ?2;

-- name: set_session
INSERT INTO tenure_session (queue, session, first, is_free) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (queue, session) DO UPDATE SET first = excluded.first, is_free = excluded.is_free;

-- name: forget_session
DELETE FROM tenure_session WHERE queue = ?1 AND session = ?2 AND state IS NULL;

-- name: free_session
SELECT session FROM tenure_session WHERE queue = ?1 AND is_free = 1 AND first IS NOT NULL ORDER BY first LIMIT 1;

-- name: state
SELECT state FROM tenure_session WHERE queue = ?1 AND session = ?2;

-- name: set_state
UPDATE tenure_session SET state = ?3 WHERE queue = ?1 AND session = ?2;

-- name: insert_death
INSERT INTO tenure_death (queue, sequence, dead_at, reason, description) VALUES (?1, ?2, ?3, ?4, ?5)
ON CONFLICT (queue, sequence) DO UPDATE
SET dead_at = excluded.dead_at, reason = excluded.reason, description = excluded.description;

-- name: delete_deaths
DELETE FROM tenure_death WHERE queue = ? AND sequence BETWEEN ? AND ?;

-- name: death
SELECT reason, description, dead_at, history
FROM tenure_death AS death JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = ?1 AND death.sequence = ?2;

-- Dead letters by a tenure.queue.broker.Selection: ?2 after, ?3 reason, ?4 dead_before, ?5 sequences and ?6 ids in
-- JSON; ?7 how the ids begin that we gave; ?8 whether those count that somebody holds; ?9 how many.
-- name: dead
SELECT death.sequence
FROM tenure_death AS death CROSS JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = ?1
  AND death.sequence > ?2
  AND (?3 IS NULL OR death.reason = ?3)
  AND (?4 IS NULL OR death.dead_at < ?4)
  AND (?5 IS NULL OR death.sequence IN (SELECT value FROM json_each(?5)))
  AND (?6 IS NULL OR coalesce(message.id, ?7 || message.sequence) IN (SELECT value FROM json_each(?6)))
  AND (
      ?8
      OR EXISTS (
          SELECT 1 FROM tenure_ready AS ready
          WHERE ready.queue = ?1 AND ready.session = '' AND ready.rank = 0 AND ready.sequence = death.sequence
      )
      OR EXISTS (
          SELECT 1 FROM tenure_delayed AS delayed
          WHERE delayed.queue = ?1 AND delayed.due_at = message.due_at AND delayed.sequence = death.sequence
      )
  )
ORDER BY death.sequence
LIMIT ?9;

-- name: dead_message
SELECT message.sequence, id, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id,
       reason, description, dead_at, history
FROM tenure_death AS death JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = ?1 AND death.sequence = ?2;

-- name: died
SELECT id, deliveries, reason
FROM tenure_death AS death JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = ?1 AND death.sequence = ?2;

-- name: deferred
SELECT sequence FROM tenure_deferred WHERE queue = ?1 AND sequence > ?2 ORDER BY sequence LIMIT ?3;

-- name: sent
INSERT INTO tenure_dedupe (queue, id, sent_at) VALUES (?1, ?2, ?3)
ON CONFLICT (queue, id) DO UPDATE SET sent_at = excluded.sent_at WHERE sent_at <= ?4;

-- name: forget_sent
DELETE FROM tenure_dedupe
WHERE (queue, id) IN (SELECT queue, id FROM tenure_dedupe WHERE queue = ?1 AND sent_at <= ?2 LIMIT ?3);

-- name: remember
INSERT INTO tenure_inbox (queue, id, until) VALUES (?1, ?2, ?3)
ON CONFLICT (queue, id) DO UPDATE SET until = max(until, excluded.until);

-- name: forget_remembered
DELETE FROM tenure_inbox
WHERE (queue, id) IN (SELECT queue, id FROM tenure_inbox WHERE queue = ?1 AND until <= ?2 LIMIT ?3);

-- name: remembered
SELECT 1 FROM tenure_inbox WHERE queue = ?1 AND id = ?2 AND until > ?3;

-- What a queue and its dead letters hold.
-- name: size
SELECT coalesce(sum(ready + locked + delayed + deferred), 0) FROM tenure_queue WHERE queue IN (?1, ?1 + 1);

-- name: delete_queue
DELETE FROM tenure_queue WHERE queue = ?1;

-- name: forget_holds
DELETE FROM tenure_hold WHERE queue = ?1;

-- name: forget_sessions
DELETE FROM tenure_session WHERE queue = ?1;

-- name: forget_ids
DELETE FROM tenure_dedupe WHERE queue = ?1;

-- name: forget_inbox
DELETE FROM tenure_inbox WHERE queue = ?1;

-- name: forget_idle
DELETE FROM tenure_idle WHERE queue = ?1;

-- name: forget_retention
DELETE FROM tenure_dead_retention WHERE queue = ?1;

-- name: set_retention
INSERT INTO tenure_dead_retention (queue, seconds) VALUES (?1, ?2)
ON CONFLICT (queue) DO UPDATE SET seconds = excluded.seconds;

-- name: set_idle
INSERT INTO tenure_idle (queue, idle_at) VALUES (?1, ?2)
ON CONFLICT (queue) DO UPDATE SET idle_at = excluded.idle_at;

-- name: idle
SELECT name FROM tenure_idle JOIN tenure_queue USING (queue) WHERE idle_at <= ?1 ORDER BY idle_at LIMIT 100;

-- name: empty_ready
DELETE FROM tenure_ready
WHERE (queue, session, rank, sequence) IN (
    SELECT queue, session, rank, sequence FROM tenure_ready WHERE queue = ?1 LIMIT ?2
)
RETURNING sequence;

-- name: empty_delayed
DELETE FROM tenure_delayed
WHERE (queue, due_at, sequence) IN (SELECT queue, due_at, sequence FROM tenure_delayed WHERE queue = ?1 LIMIT ?2)
RETURNING sequence;

-- name: empty_deferred
DELETE FROM tenure_deferred
WHERE (queue, sequence) IN (SELECT queue, sequence FROM tenure_deferred WHERE queue = ?1 LIMIT ?2)
RETURNING sequence;

-- name: some_holds
SELECT token, part, sequences FROM tenure_hold WHERE queue = ?1 LIMIT ?2;

-- name: timed
SELECT ?1, expires_at, sequence FROM tenure_message WHERE sequence BETWEEN ?2 AND ?3 AND expires_at IS NOT NULL;
