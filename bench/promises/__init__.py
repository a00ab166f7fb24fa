"""The promises of docs/scheduling.md, tested on real servers through gRPC; one file per scenario."""
