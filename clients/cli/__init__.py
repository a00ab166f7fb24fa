"""The `pagoda` command."""
