-- The statements about the tables of queues. Times: "now" counts since this boot, "wall" in Unix seconds.
--
-- A statement has plain ? in the order of its values, or names where it needs a value twice. Never ?1: Python 3.12 takes
-- that for a name, and warns where the values come in order.

-- name: clock
SELECT origin, sequence, boot, ahead, seen FROM tenure_queue_clock;

-- name: newest_sequence
SELECT coalesce(max(sequence), 0) FROM tenure_message;

-- name: set_clock
UPDATE tenure_queue_clock SET sequence = ?, boot = ?, ahead = ?, seen = ?;

-- name: boots
SELECT boot FROM tenure_queue_clock UNION SELECT DISTINCT boot FROM tenure_hold;

-- name: queue_by_name
SELECT queue, name, max_deliveries, dedupe_window, limits.queue IS NOT NULL, limits.max_locked IS NOT NULL
FROM tenure_queue LEFT JOIN tenure_limit AS limits USING (queue)
WHERE name = ?;

-- name: queue_by_number
SELECT queue, name, max_deliveries, dedupe_window, limits.queue IS NOT NULL, limits.max_locked IS NOT NULL
FROM tenure_queue LEFT JOIN tenure_limit AS limits USING (queue)
WHERE queue = ?;

-- name: holding
SELECT queue.name
FROM json_each(?) AS asked CROSS JOIN tenure_queue AS queue ON queue.name = asked.value
WHERE queue.ready + queue.locked + queue.delayed > 0;

-- name: names
SELECT name FROM tenure_queue WHERE queue % 2 = 0 ORDER BY name;

-- name: settings
SELECT lock, max_deliveries, dedupe_window, body_max, coalesce(seconds, 9e999),
       max_locked, rate, rate_seconds, session_rate, session_seconds, coalesce(paused, 0)
FROM tenure_queue LEFT JOIN tenure_dead_retention USING (queue) LEFT JOIN tenure_limit USING (queue)
WHERE name = ?;

-- name: declared
SELECT setting FROM tenure_declared JOIN tenure_queue USING (queue) WHERE name = ?;

-- name: note_declared
INSERT OR IGNORE INTO tenure_declared (queue, setting) VALUES (?, ?);

-- name: declare
UPDATE tenure_queue SET lock = ?, max_deliveries = ?, dedupe_window = ?, body_max = ? WHERE name = ?;

-- name: create_queue
INSERT INTO tenure_queue (queue, name, lock, max_deliveries, dedupe_window, body_max) VALUES (?, ?, ?, ?, ?, ?);

-- The number of a queue tells it from one of the same name that was deleted: so the next one is some way behind the newest.
-- name: newest_queue
SELECT coalesce(max(queue), -1) + 2 * (random() & 1048575) FROM tenure_queue;

-- name: any_queue
SELECT queue FROM tenure_queue
WHERE queue >= (SELECT abs(random() % (max(queue) + 1)) FROM tenure_queue) AND queue % 2 = 0
ORDER BY queue LIMIT 1;

-- name: add_counts
UPDATE tenure_queue
SET ready = ready + ?, locked = locked + ?, delayed = delayed + ?, deferred = deferred + ?
WHERE queue = ?;

-- name: counts
SELECT live.queue, live.ready, live.locked, live.delayed, live.deferred,
       dead.ready + dead.locked + dead.delayed, coalesce(limits.paused, 0)
FROM tenure_queue AS live
JOIN tenure_queue AS dead ON dead.queue = live.queue | 1
LEFT JOIN tenure_limit AS limits ON limits.queue = live.queue
WHERE live.name = ?;

-- name: oldest
WITH ranks (rank) AS (VALUES (0), (-1), (-2), (-3), (-4), (-5), (-6), (-7), (-8), (-9)),
firsts (sequence) AS (
    SELECT (SELECT min(sequence) FROM tenure_ready WHERE queue = :queue AND session = '' AND rank = ranks.rank) FROM ranks
    UNION ALL SELECT (SELECT min(first) FROM tenure_session WHERE queue = :queue AND is_free = 0 AND first IS NOT NULL)
    UNION ALL SELECT (SELECT min(first) FROM tenure_session WHERE queue = :queue AND is_free = 1 AND first IS NOT NULL)
)
SELECT enqueued_at FROM tenure_message WHERE sequence = (SELECT min(sequence) FROM firsts);

-- When a delay, a lock and an expiry are due next, and whether there are locks from another boot. Each is the first
-- entry of an index.
-- name: next_due
SELECT (SELECT min(due_at) FROM tenure_delayed WHERE queue = :queue),
       (SELECT min(until) FROM tenure_hold WHERE queue = :queue AND boot = :boot),
       (SELECT min(expires_at) FROM tenure_expiry WHERE queue = :queue),
       EXISTS (SELECT 1 FROM tenure_hold WHERE queue = :queue AND boot < :boot)
       OR EXISTS (SELECT 1 FROM tenure_hold WHERE queue = :queue AND boot > :boot);

-- name: expired_lock_groups
SELECT token, part, session, was_deferred, sequences
FROM tenure_hold
WHERE queue = ? AND boot = ? AND until <= ?
ORDER BY until LIMIT 1;

-- name: restamp_foreign_lock_groups
UPDATE tenure_hold SET until = :now + lock, boot = :boot WHERE queue = :queue AND boot <> :boot;

-- name: restamp_late_lock_groups
UPDATE tenure_hold SET until = :now + lock WHERE boot = :boot AND until > :now + lock;

-- name: due_delayed
SELECT sequence, due_at FROM tenure_delayed WHERE queue = ? AND due_at <= ? ORDER BY due_at, sequence LIMIT ?;

-- name: expired_messages
SELECT sequence, expires_at FROM tenure_expiry WHERE queue = ? AND expires_at <= ? ORDER BY expires_at LIMIT ?;

-- name: insert_message
INSERT INTO tenure_message (sequence, queue, deliveries, enqueued_at, priority, id, headers, session, due_at,
                            expires_at, reply_to, correlation_id, history, body)
VALUES (?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL, ?);

-- name: insert_plain
INSERT INTO tenure_message (queue, enqueued_at, deliveries, priority, sequence, body)
VALUES (?, ?, 0, 0, ?, ?);

-- The last brackets are repeated for each message.
-- name: insert_many_plain
INSERT INTO tenure_message (queue, enqueued_at, deliveries, priority, sequence, body)
SELECT ?, ?, 0, 0, column1, column2 FROM (VALUES (?, ?));

-- name: ready_range
INSERT OR IGNORE INTO tenure_ready (queue, session, rank, sequence)
SELECT queue, coalesce(session, ''), iif(session IS NULL, -priority, 0), sequence
FROM tenure_message
WHERE sequence BETWEEN ? AND ? AND due_at IS NULL;

-- Whether another program has put it there already doesn't matter: "OR IGNORE" in these.
-- name: insert_ready
INSERT OR IGNORE INTO tenure_ready (queue, session, rank, sequence) VALUES (?, ?, ?, ?);

-- name: delete_ready
DELETE FROM tenure_ready WHERE queue = ? AND session = ? AND rank = ? AND sequence = ?;

-- name: insert_delayed
INSERT OR IGNORE INTO tenure_delayed (queue, due_at, sequence, session) VALUES (?, ?, ?, ?);

-- name: delete_delayed
DELETE FROM tenure_delayed WHERE queue = ? AND due_at = ? AND sequence = ?;

-- name: insert_expiry
INSERT OR IGNORE INTO tenure_expiry (queue, expires_at, sequence) VALUES (?, ?, ?);

-- name: delete_expiry
DELETE FROM tenure_expiry WHERE queue = ? AND expires_at = ? AND sequence = ?;

-- name: insert_deferred
INSERT OR IGNORE INTO tenure_deferred (queue, sequence) VALUES (?, ?);

-- name: is_deferred
SELECT 1 FROM tenure_deferred WHERE queue = ? AND sequence = ?;

-- name: delete_deferred
DELETE FROM tenure_deferred WHERE queue = ? AND sequence = ?;

-- CROSS JOIN fixes the order: from the short list to the messages.
-- name: claimable
SELECT message.sequence, id, body, headers, deliveries, enqueued_at, message.session, priority, reply_to,
       correlation_id, expires_at, ready.rank
FROM tenure_ready AS ready CROSS JOIN tenure_message AS message ON message.sequence = ready.sequence
WHERE ready.queue = ? AND ready.session = ?
ORDER BY ready.rank, ready.sequence
LIMIT ?;

-- Places of messages that another program has deleted.
-- name: delete_ready_without_message
DELETE FROM tenure_ready
WHERE queue = ? AND session = ?
  AND NOT EXISTS (SELECT 1 FROM tenure_message AS message WHERE message.sequence = tenure_ready.sequence);

-- name: delete_ready_up_to
DELETE FROM tenure_ready WHERE queue = ? AND session = ? AND (rank, sequence) <= (?, ?);

-- name: message
SELECT sequence, id, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id, expires_at, 0
FROM tenure_message WHERE sequence = ?;

-- name: message_state
SELECT deliveries, priority, session, due_at, expires_at, history FROM tenure_message WHERE sequence = ?;

-- name: set_message_state
UPDATE tenure_message SET deliveries = ?, history = ? WHERE sequence = ?;

-- name: set_due
UPDATE tenure_message SET due_at = ? WHERE sequence = ?;

-- name: reset_message
UPDATE tenure_message SET deliveries = 0, due_at = NULL, expires_at = NULL WHERE sequence = ?;

-- name: delete_messages
DELETE FROM tenure_message WHERE sequence BETWEEN ? AND ?;

-- name: insert_lock_group
INSERT INTO tenure_hold (token, part, queue, session, was_deferred, boot, until, lock, sequences, holder, since)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: copy_holder
UPDATE tenure_hold AS part SET (holder, since) = (
    SELECT first.holder, first.since FROM tenure_hold AS first WHERE first.token = part.token AND first.part = ?
)
WHERE part.token = ? AND part.part = ?;

-- name: lock_groups
SELECT part, queue, session, was_deferred,
       -- From another boot, or later than possible: it restarts with its whole length.
       CASE WHEN boot <> :boot THEN :now + lock ELSE min(until, :now + lock) END, lock, sequences
FROM tenure_hold
WHERE token = :token AND (boot <> :boot OR until > :now)
ORDER BY part;

-- name: newest_part
SELECT max(part) FROM tenure_hold WHERE token = ?;

-- name: set_lock_group_messages
UPDATE tenure_hold SET sequences = ? WHERE token = ? AND part = ?;

-- name: renew_lock_group
UPDATE tenure_hold SET boot = ?, until = ?, lock = ? WHERE token = ? AND part = ?;

-- name: delete_lock_group
DELETE FROM tenure_hold WHERE token = ? AND part = ?;

-- name: lock_group_of_session
SELECT 1 FROM tenure_hold WHERE queue = ? AND session = ?;

-- name: first_in_session
SELECT min(sequence) FROM tenure_ready WHERE queue = ? AND session = ? AND rank = 0;

-- name: blocking_in_session
SELECT min(sequence) FROM tenure_delayed WHERE queue = ? AND session = ?;

-- name: set_session
INSERT INTO tenure_session (queue, session, first, is_free) VALUES (?, ?, ?, ?)
ON CONFLICT (queue, session) DO UPDATE SET first = excluded.first, is_free = excluded.is_free;

-- name: delete_session
DELETE FROM tenure_session WHERE queue = ? AND session = ? AND state IS NULL;

-- name: free_session
SELECT session, first FROM tenure_session WHERE queue = ? AND is_free = 1 AND first IS NOT NULL ORDER BY first LIMIT 1;

-- name: set_aside_session
UPDATE tenure_session SET is_free = 0 WHERE queue = ? AND is_free = 1 AND first = ?;

-- name: state
SELECT state FROM tenure_session WHERE queue = ? AND session = ?;

-- name: set_state
UPDATE tenure_session SET state = ? WHERE queue = ? AND session = ?;

-- name: insert_death
INSERT INTO tenure_death (queue, sequence, dead_at, reason, description) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (queue, sequence) DO UPDATE
SET dead_at = excluded.dead_at, reason = excluded.reason, description = excluded.description;

-- name: delete_deaths
DELETE FROM tenure_death WHERE queue = ? AND sequence BETWEEN ? AND ?;

-- name: death
SELECT reason, description, dead_at, history
FROM tenure_death AS death JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = ? AND death.sequence = ?;

-- Dead letters by a tenure._queue.broker.Selection, with its sequences and ids in JSON; :prefix is the beginning of
-- generated ids, :with_locked whether locked ones count.
-- name: dead_letters
SELECT death.sequence
FROM tenure_death AS death CROSS JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = :queue
  AND death.sequence > :after
  AND (:reason IS NULL OR death.reason = :reason)
  AND (:dead_before IS NULL OR death.dead_at < :dead_before)
  AND (:sequences IS NULL OR death.sequence IN (SELECT value FROM json_each(:sequences)))
  AND (:ids IS NULL OR coalesce(message.id, :prefix || message.sequence) IN (SELECT value FROM json_each(:ids)))
  AND (
      :with_locked
      OR EXISTS (
          SELECT 1 FROM tenure_ready AS ready
          WHERE ready.queue = :queue AND ready.session = '' AND ready.rank = 0 AND ready.sequence = death.sequence
      )
      OR EXISTS (
          SELECT 1 FROM tenure_delayed AS delayed
          WHERE delayed.queue = :queue AND delayed.due_at = message.due_at AND delayed.sequence = death.sequence
      )
  )
ORDER BY death.sequence
LIMIT :limit;

-- name: dead_letter
SELECT message.sequence, id, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id,
       reason, description, dead_at, history
FROM tenure_death AS death JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = ? AND death.sequence = ?;

-- name: death_summary
SELECT id, deliveries, reason
FROM tenure_death AS death JOIN tenure_message AS message ON message.sequence = death.sequence
WHERE death.queue = ? AND death.sequence = ?;

-- name: deferred
SELECT sequence FROM tenure_deferred WHERE queue = ? AND sequence > ? ORDER BY sequence LIMIT ?;

-- The conditions of a tenure._queue.broker.LiveSelection, with its sequences and ids in JSON; :prefix is the beginning of
-- generated ids. It replaces {fits} in each of the next five.
-- name: fits
message.sequence > :after
  AND (:session IS NULL OR message.session = :session)
  AND (:sent_before IS NULL OR message.enqueued_at < :sent_before)
  AND (:sequences IS NULL OR message.sequence IN (SELECT value FROM json_each(:sequences)))
  AND (:ids IS NULL OR coalesce(message.id, :prefix || message.sequence) IN (SELECT value FROM json_each(:ids)))

-- In each rank, the first messages are the first entries of the index; in the other places, all are read.
-- name: live_ranked
SELECT message.sequence
FROM tenure_ready AS ready CROSS JOIN tenure_message AS message ON message.sequence = ready.sequence
WHERE ready.queue = :queue AND ready.session = '' AND ready.rank = :rank AND ready.sequence > :after AND {fits}
ORDER BY ready.sequence LIMIT :limit;

-- name: live_in_sessions
SELECT message.sequence
FROM tenure_ready AS ready CROSS JOIN tenure_message AS message ON message.sequence = ready.sequence
WHERE ready.queue = :queue AND ready.session > '' AND (:session IS NULL OR ready.session = :session) AND {fits}
ORDER BY ready.sequence LIMIT :limit;

-- name: live_delayed
SELECT message.sequence
FROM tenure_delayed AS delayed CROSS JOIN tenure_message AS message ON message.sequence = delayed.sequence
WHERE delayed.queue = :queue AND {fits}
ORDER BY delayed.sequence LIMIT :limit;

-- name: live_deferred
SELECT message.sequence
FROM tenure_deferred AS deferred CROSS JOIN tenure_message AS message ON message.sequence = deferred.sequence
WHERE deferred.queue = :queue AND deferred.sequence > :after AND {fits}
ORDER BY deferred.sequence LIMIT :limit;

-- name: live_locked
SELECT message.sequence
FROM json_each(:locked) AS locked CROSS JOIN tenure_message AS message ON message.sequence = locked.value
WHERE {fits}
ORDER BY message.sequence LIMIT :limit;

-- name: all_lock_groups
SELECT until, sequences, holder, since FROM tenure_hold WHERE queue = ?;

-- name: live_message
SELECT sequence, id, body, headers, deliveries, enqueued_at, session, priority, reply_to, correlation_id, due_at
FROM tenure_message WHERE sequence = ?;

-- name: remember_sent_id
INSERT INTO tenure_dedupe (queue, id, sent_at) VALUES (?, ?, ?)
ON CONFLICT (queue, id) DO UPDATE SET sent_at = excluded.sent_at WHERE sent_at <= ?;

-- name: delete_old_sent_ids
DELETE FROM tenure_dedupe
WHERE (queue, id) IN (SELECT queue, id FROM tenure_dedupe WHERE queue = ? AND sent_at <= ? LIMIT ?);

-- name: remember_handled_id
INSERT INTO tenure_inbox (queue, id, until) VALUES (?, ?, ?)
ON CONFLICT (queue, id) DO UPDATE SET until = max(until, excluded.until);

-- name: delete_old_handled_ids
DELETE FROM tenure_inbox
WHERE (queue, id) IN (SELECT queue, id FROM tenure_inbox WHERE queue = ? AND until <= ? LIMIT ?);

-- name: is_handled
SELECT 1 FROM tenure_inbox WHERE queue = ? AND id = ? AND until > ?;

-- The number of messages of a queue and its dead letters.
-- name: size
SELECT coalesce(sum(ready + locked + delayed + deferred), 0) FROM tenure_queue WHERE queue IN (:queue, :queue + 1);

-- name: delete_queue
DELETE FROM tenure_queue WHERE queue = ?;

-- name: clear_lock_groups
DELETE FROM tenure_hold WHERE queue = ?;

-- name: clear_sessions
DELETE FROM tenure_session WHERE queue = ?;

-- name: clear_sent_ids
DELETE FROM tenure_dedupe WHERE queue = ?;

-- name: clear_handled_ids
DELETE FROM tenure_inbox WHERE queue = ?;

-- name: clear_idle
DELETE FROM tenure_idle WHERE queue = ?;

-- name: clear_retention
DELETE FROM tenure_dead_retention WHERE queue = ?;

-- name: clear_declared
DELETE FROM tenure_declared WHERE queue = ?;

-- name: clear_limits
DELETE FROM tenure_limit WHERE queue = ?;

-- name: clear_schedules
DELETE FROM tenure_schedule WHERE queue = ?;

-- name: schedules
SELECT s.name, s.record FROM tenure_schedule AS s JOIN tenure_queue AS q USING (queue) WHERE q.name = ?;

-- name: schedule
SELECT record FROM tenure_schedule WHERE queue = ? AND name = ?;

-- name: set_schedule
INSERT INTO tenure_schedule (queue, name, record) VALUES (?, ?, ?)
ON CONFLICT (queue, name) DO UPDATE SET record = excluded.record;

-- name: delete_schedule
DELETE FROM tenure_schedule WHERE queue = ? AND name = ?;

-- name: set_limits
INSERT INTO tenure_limit (queue, max_locked, rate, rate_seconds, session_rate, session_seconds, paused)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (queue) DO UPDATE
SET max_locked = excluded.max_locked, rate = excluded.rate, rate_seconds = excluded.rate_seconds,
    session_rate = excluded.session_rate, session_seconds = excluded.session_seconds, paused = excluded.paused;

-- name: locked
SELECT locked FROM tenure_queue WHERE queue = ?;

-- name: any_ready
SELECT EXISTS (SELECT 1 FROM tenure_ready WHERE queue = ? AND session = '');

-- name: delivered
SELECT bursts FROM tenure_delivered WHERE queue = ? AND session = ?;

-- name: set_delivered
INSERT INTO tenure_delivered (queue, session, at, bursts) VALUES (?, ?, ?, ?)
ON CONFLICT (queue, session) DO UPDATE SET at = excluded.at, bursts = excluded.bursts;

-- name: delete_old_deliveries
DELETE FROM tenure_delivered
WHERE (queue, session) IN (
    SELECT queue, session FROM tenure_delivered WHERE queue = ? AND at <= ? AND session > '' LIMIT ?
);

-- name: set_retention
INSERT INTO tenure_dead_retention (queue, seconds) VALUES (?, ?)
ON CONFLICT (queue) DO UPDATE SET seconds = excluded.seconds;

-- name: set_idle
INSERT INTO tenure_idle (queue, idle_at) VALUES (?, ?)
ON CONFLICT (queue) DO UPDATE SET idle_at = excluded.idle_at;

-- name: idle
SELECT name FROM tenure_idle JOIN tenure_queue USING (queue) WHERE idle_at <= ? ORDER BY idle_at LIMIT 100;

-- name: empty_ready
DELETE FROM tenure_ready
WHERE (queue, session, rank, sequence) IN (
    SELECT queue, session, rank, sequence FROM tenure_ready WHERE queue = ? LIMIT ?
)
RETURNING sequence;

-- name: empty_delayed
DELETE FROM tenure_delayed
WHERE (queue, due_at, sequence) IN (SELECT queue, due_at, sequence FROM tenure_delayed WHERE queue = ? LIMIT ?)
RETURNING sequence;

-- name: empty_deferred
DELETE FROM tenure_deferred
WHERE (queue, sequence) IN (SELECT queue, sequence FROM tenure_deferred WHERE queue = ? LIMIT ?)
RETURNING sequence;

-- name: some_lock_groups
SELECT token, part, sequences FROM tenure_hold WHERE queue = ? LIMIT ?;

-- name: expiring
SELECT ?, expires_at, sequence FROM tenure_message WHERE sequence BETWEEN ? AND ? AND expires_at IS NOT NULL;
