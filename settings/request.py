"""Limits of a request's fields, which the router checks for its clients and the engine for its routers."""

from __future__ import annotations

import re
from typing import Any

MAX_N = 64  # sequences from one input
MAX_LOGPROBS = 20  # most likely tokens that are reported for one position
MAX_STOP_IDS = 64  # that a client gives
MAX_EOS_IDS = 64  # the model's own, which a request has besides
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_DRAFT_TOKENS = 16  # of a sequence in one step
MAX_GRAMMAR_BYTES = 256 << 10
MAX_CHOICES = 4096
MAX_REQUEST_ID = 128  # characters
MAX_SALT_BYTES = 128
MAX_PRIORITY = 1000
MAX_SLO_S = 3600.0
MAX_TENANT_LENGTH = 64
MAX_ADAPTER_NAME = 128  # characters
MAX_ADAPTER_PATH = 4096
TENANT_NAME = re.compile(rf"[A-Za-z0-9._:@/-]{{1,{MAX_TENANT_LENGTH}}}")

# How JSON is written where a schema leaves it open, as most programs and models write it, in llguidance's words. A
# schema can ask for other white space itself, by its keyword "x-guidance".
JSON_STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
