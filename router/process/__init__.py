"""The router process: `main.serve` starts it, with its port, its services, its engine and further routers."""
