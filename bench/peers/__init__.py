"""Other systems, each in a process of its own (worker.py) and behind one interface (peer.py)."""
