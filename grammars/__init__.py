"""The grammars that guide outputs: the router checks them, the engine follows them, each in threads of its own."""
