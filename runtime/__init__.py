"""What each process runs on: its event loop and its logs."""
