PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE runs (
            run INTEGER PRIMARY KEY AUTOINCREMENT,
            time REAL NOT NULL,
            size INTEGER NOT NULL,
            pinned INTEGER NOT NULL DEFAULT 0,
            note TEXT NOT NULL DEFAULT '',
            kind TEXT NOT NULL,
            engine TEXT NOT NULL,
            model TEXT NOT NULL,
            model_version TEXT NOT NULL,
            nbengine TEXT NOT NULL,
            notebook TEXT NOT NULL,
            cell TEXT NOT NULL,
            execution TEXT NOT NULL,
            comparison TEXT NOT NULL,
            finish_reason TEXT,
            error TEXT NOT NULL,
            tokens INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            metrics TEXT NOT NULL,
            varied TEXT NOT NULL,
            settings TEXT NOT NULL,
            prompt TEXT NOT NULL,
            text TEXT NOT NULL,
            outputs TEXT NOT NULL,
            messages TEXT NOT NULL
        );
INSERT INTO "runs" VALUES(1,1750000000.0,96,0,'','generate','box','tiny','r1','0.1.0','','','','','stop','',0,0,0,'{}','{}','{"temperature": 0.5, "chat": false}','why is the sky blue?','because','[]','[]');
INSERT INTO "runs" VALUES(2,1750000100.0,187,1,'the best','chat','box','tiny','r1','0.1.0','','','','','stop','',0,0,0,'{}','{}','{"temperature": 0.0, "system": "Short.", "chat": true}','and the sea?','because','[]','[{"role": "system", "content": "Short."}, {"role": "user", "content": "and the sea?"}]');
CREATE INDEX runs_by_time ON runs (time);
CREATE INDEX runs_by_cell ON runs (cell, run);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('runs',2);
COMMIT;
