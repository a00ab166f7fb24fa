"""The `pagoda` command: one module per command or family of commands; `app.py` names them all."""

INTERRUPTED = 130  # a shell's exit code for a program that Ctrl-C has ended
