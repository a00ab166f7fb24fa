"""The first process of a server that has been upgraded: see succession.py."""

import sys

from .main import serve_on
from .succession import CHECK, Handover, take_over

if sys.argv[1:] == [CHECK]:
    Handover.from_json(sys.stdin.read())
else:
    sys.exit(serve_on(take_over(int(sys.argv[2]))))
