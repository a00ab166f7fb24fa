"""A fleet: engines and routers on many machines, placed, counted and replaced by a driver without model or tokens.

driver   keeps as many engines and routers as wanted, and writes the file of members that routers follow
group    the engines, or the routers: started again when they end, and replaced when asked
policy   how many engines the load asks for, as a pure function
metrics  what the driver shows Prometheus
host     runs one engine or router as a child, on whatever machine it was placed
health   whether a router answers its host
on_ray   hosts as actors of Ray; the only file that imports it
folder   what the driver keeps on disk: the members, certificates and the token
control  how the other commands reach the driver
"""
