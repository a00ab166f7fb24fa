"""The text side: validates requests, tokenizes, dispatches to engines and streams text back. Never imports torch."""
