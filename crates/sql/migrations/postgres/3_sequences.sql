-- Which numbers were used by senders who count their messages.
CREATE TABLE {sequences} (
    sender text PRIMARY KEY,
    -- All before this one were used.
    next bigint NOT NULL,
    -- Up to this one, they may have been used.
    reserved bigint NOT NULL,
    -- Who has reserved them; nobody where they are taken in transactions.
    holder text
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000
);
