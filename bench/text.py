"""The text that the benchmark reads where random tokens will not do; it was written for this purpose."""

from __future__ import annotations

from pathlib import Path

TEXT = Path(__file__).with_name("quality_text.txt")
