"""The text side: what clients speak to. It never imports torch."""
