"""What each process runs on: its event loop, its logs, the files that it follows, and the channel's guards."""
