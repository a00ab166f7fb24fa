"""What each process runs on: its event loop, its logs, files that it follows, the channel's guards, their authority."""
