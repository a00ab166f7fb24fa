"""The thread that schedules, launches and commits steps. Public face: EngineLoop with its Inbox, Runner and Outbox."""
