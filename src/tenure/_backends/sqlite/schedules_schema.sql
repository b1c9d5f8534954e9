-- What is kept of the schedules of queues.
CREATE TABLE IF NOT EXISTS tenure_schedule (
    queue  INTEGER NOT NULL,
    name   TEXT NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (queue, name)
) WITHOUT ROWID;
