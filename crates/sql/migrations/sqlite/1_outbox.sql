-- A lane is what one relay works on at a time: it has a lease. All messages of an ordering key are in the same lane.
CREATE TABLE {outbox_lanes} (
    lane INTEGER PRIMARY KEY,
    holder TEXT,
    -- Until when the holder has it. Times are milliseconds since 1970.
    held_until INTEGER NOT NULL DEFAULT 0
);
INSERT INTO {outbox_lanes} (lane)
WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < 63) SELECT n FROM numbers;

CREATE TABLE {outbox} (
    -- Never given out twice, so that the order stays that of writing when all rows were deleted.
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    lane INTEGER NOT NULL,
    -- 0: to be sent; 1: set aside; 2: sent.
    state INTEGER NOT NULL DEFAULT 0,
    -- How often the broker has refused it.
    attempts INTEGER NOT NULL DEFAULT 0,
    ordering_key TEXT,
    exchange TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    -- Whether it has to reach a queue.
    mandatory INTEGER NOT NULL,
    -- As on the wire.
    properties BLOB NOT NULL,
    body BLOB NOT NULL,
    written_at INTEGER NOT NULL,
    -- Not before this time.
    due_at INTEGER,
    -- Since when it has been in its state, if that is not 0.
    settled_at INTEGER,
    -- Why it was refused the last time.
    error TEXT
);
CREATE INDEX {outbox_waiting} ON {outbox} (lane, id) WHERE state = 0;
-- What holds back the later messages of its key. Few, if all is well.
CREATE INDEX {outbox_refused} ON {outbox} (lane, ordering_key, id) WHERE attempts > 0 AND state < 2;
CREATE INDEX {outbox_settled} ON {outbox} (state, settled_at) WHERE state > 0;
