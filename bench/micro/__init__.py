"""Micro-benchmarks: parts of Pagoda alone, `python -m bench.micro.NAME`.

bookkeeping  Python time of a step around the model
channel      latency and CPU time of the link between router and engine
choice       a router's choice of an engine by what engines have cached
crowds       schedule() with thousands of sequences waiting
experts      bytes and milliseconds of a layer with experts, beside a dense one and transformers
guided       what a grammar costs per step, and what forced tokens save
migration    how long streams pause that move from one engine to another
replacements  streams that break when a server is replaced, beside llama.cpp's
resume       restarting a preempted sequence: recomputed, or loaded from host memory
roles        ITL of streams beside long prompts that another engine computes
router       capacity of a router process, and what it adds to TTFT and ITL
speculation  what drafts gain one stream, and cost many
step         milliseconds of the default model's steps
"""

from pagoda_server.engine.runners.import_torch import limit_spinning

limit_spinning()  # as in an engine, before torch is imported
