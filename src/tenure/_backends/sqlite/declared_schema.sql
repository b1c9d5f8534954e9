-- The declared settings of queues, by name; the others have their defaults.
CREATE TABLE IF NOT EXISTS tenure_declared (
    queue   INTEGER NOT NULL,
    setting TEXT NOT NULL,
    PRIMARY KEY (queue, setting)
) WITHOUT ROWID;

-- In a file older than this table, a setting that is not the default was declared.
INSERT OR IGNORE INTO tenure_declared SELECT queue, 'lock' FROM tenure_queue WHERE lock <> 30;
INSERT OR IGNORE INTO tenure_declared SELECT queue, 'max_deliveries' FROM tenure_queue WHERE max_deliveries <> 10;
INSERT OR IGNORE INTO tenure_declared SELECT queue, 'dedupe_window' FROM tenure_queue WHERE dedupe_window <> 600;
INSERT OR IGNORE INTO tenure_declared SELECT queue, 'body_max' FROM tenure_queue WHERE body_max <> 1048576;
INSERT OR IGNORE INTO tenure_declared SELECT queue, 'dead_retention' FROM tenure_dead_retention;
