"""The `pagoda` command: one module per command or family of commands, started by `__main__.main`."""
