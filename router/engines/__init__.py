"""The router's end of the engines: `EngineChannel` and `Dispatcher`, the streams of requests, the transports."""
