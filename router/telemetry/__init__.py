"""What is told of calls: metrics, traces, one line of log a request."""
