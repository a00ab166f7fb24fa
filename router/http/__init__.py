"""HTTP beside gRPC, in the same process and event loop: the same requests, limits and tenants."""
