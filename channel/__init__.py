"""Connections between a router and an engine: their interface, and the transport over shared memory.

address    the addresses that command lines take     listening  how a server binds one
link       the interface of a connection             shm, ring  connections over shared memory

The room does not know what the messages say.
"""
