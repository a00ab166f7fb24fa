"""What docs/scheduling.md promises, on real servers through gRPC: one file for each scenario."""
