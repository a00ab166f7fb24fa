"""What is recorded of calls: metrics, traces, one line of log a request."""
