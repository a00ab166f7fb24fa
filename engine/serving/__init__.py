"""The engine process and its end of the channel. Public face: run of main.py, and EngineServer."""
