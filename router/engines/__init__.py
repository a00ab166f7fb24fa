"""The router's end of the engines: `EngineChannel` and `Fleet`, the streams of requests, the transports."""
