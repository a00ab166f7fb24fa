"""The server beside the programs that others use with it: `make test-counterparts`.

Each test runs a real counterpart: a client library, a browser, a gateway, Prometheus. `install` fetches Debian packages;
`environments.py` puts Python and npm packages into environments of their own, because some need other versions of
protobuf.
"""
