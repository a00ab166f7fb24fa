"""Four ways to serve a queue of requests, compared: sequential, interleaved, static and continuous batching."""
