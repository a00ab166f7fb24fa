"""Peers: other systems, each behind one interface (peer.py) in a process of its own (worker.py)."""
