"""What each process runs on: its event loop, its logs, and the files that it follows."""
