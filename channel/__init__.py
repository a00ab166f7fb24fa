"""What carries messages between a router and an engine: the interface of both ends, and the shared-memory transport.

It knows nothing of what the messages say.
"""
