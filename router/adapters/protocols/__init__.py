"""The adapters' protocols: what this server reads and writes of each, and the generated stubs (`make protos`)."""
