"""What a router and an engine share: the link that carries messages between them, and how a token may be chosen.

The link knows nothing of what its messages say.
"""
