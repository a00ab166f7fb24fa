"""A fleet: engines on many machines, placed, counted and replaced by a driver that has neither model nor tokens.

driver   keeps as many engines as wanted, and writes the file of members that routers follow
policy   how many engines the load asks for, as a pure function
host     runs one engine as a child, on whatever machine it was placed
on_ray   hosts as actors of Ray; the only file that imports it
folder   what the driver keeps on disk: the members, certificates and the token
control  how the other commands reach the driver
"""
