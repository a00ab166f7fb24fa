"""Ways to batch the same requests at the same costs; docs/batching.md has the results."""
