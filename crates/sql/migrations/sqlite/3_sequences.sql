-- Which numbers were used by senders who count their messages.
CREATE TABLE {sequences} (
    sender TEXT PRIMARY KEY,
    -- All before this one were used.
    next INTEGER NOT NULL,
    -- Up to this one, they may have been used.
    reserved INTEGER NOT NULL,
    -- Who has reserved them; nobody where they are taken in transactions.
    holder TEXT
);
