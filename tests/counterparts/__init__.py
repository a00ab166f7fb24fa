"""The server beside the programs that others use with it: `make test-counterparts`.

Each test runs a real counterpart: a client library, a browser, a gateway, Prometheus. `install` fetches packages of
Debian; `environments.py` puts those of PyPI and npm into environments of their own, because some need other versions
of protobuf.
"""
