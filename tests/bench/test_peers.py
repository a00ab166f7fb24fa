"""Peers without their programs: transformers with a tiny model, a fake llama-server, worker processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from bench import BenchError
from bench.measure import RequestTimes
from bench.peers import llama_server, transformers_continuous
from bench.peers.gguf_files import copied_gguf
from bench.peers.peer import Arrivals, Peer, PeerRun, PeerSettings
from bench.peers.process import peer_process
from bench.peers.registry import PEERS
from bench.peers.worker import read_run, read_workload, write_workload
from bench.workloads import Request, Workload
from tests.checkpoints.tiny_gguf import tiny_model
from tests.engine.tiny_models import MODELS, save_model

pytestmark = pytest.mark.thorough

WORKLOAD = Workload("three", [Request([5, 6, 7], 6), Request([8] * 11, 2, 0.0, "short"), Request([9], 4, 0.05)])


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> PeerSettings:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(MODELS["smollm"], folder, torch.bfloat16)
    return PeerSettings(str(folder), "", 1, max_num_seqs=4, longest=64, count=3, prefix_caching=False)


def check(run: PeerRun, heard: list[int]) -> None:
    assert [len(times.arrivals) for times in run.times] == [6, 2, 4]
    assert [times.kind for times in run.times] == ["", "short", ""]
    assert [times.submitted for times in run.times] == [0.0, 0.0, 0.05]
    assert all(times.ttft_s > 0 for times in run.times)
    assert sum(heard) == 12


def test_generate_batch_gives_each_request_its_own_length(settings: PeerSettings) -> None:
    heard: list[int] = []
    check(transformers_continuous.Peer(settings).run(WORKLOAD, heard.append), heard)


def test_a_peers_process_answers_workloads_until_it_is_told_to_end(settings: PeerSettings) -> None:
    with peer_process("transformers-generate-batch", sys.executable, settings) as process:
        assert process.versions["torch"] == torch.__version__
        for _ in range(2):
            run = process.run(WORKLOAD, lambda count: None)
            assert [len(times.arrivals) for times in run.times] == [6, 2, 4]
            assert run.peak_memory_bytes is not None
            assert run.peak_memory_bytes > 100e6


def test_a_peer_that_cannot_start_says_why(settings: PeerSettings) -> None:
    nowhere = replace(settings, model="/nowhere")
    with (
        pytest.raises(BenchError, match="nowhere"),
        peer_process("transformers-generate-batch", sys.executable, nowhere),
    ):
        pass


FAKE_LLAMA_SERVER = '''#!{python}
"""A fake llama-server with steps of 1 ms; it sends a character of two tokens with the second one."""
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "--version" in sys.argv:
    sys.exit("version: 42 (fake)")
steps = 0

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *arguments): pass
    def do_GET(self):
        body = ("llamacpp:n_decode_total %d\\n" % steps if self.path == "/metrics" else "ok").encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        global steps
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"] and asked["stream"] and not asked["cache_prompt"], asked
        self.send_response(200); self.send_header("Transfer-Encoding", "chunked"); self.end_headers()
        for count in range(1, asked["n_predict"] + 1):
            time.sleep(0.001); steps += 1
            if count != 1 or count == asked["n_predict"]:
                data = b"data: " + json.dumps({{"tokens": [0], "tokens_predicted": count}}).encode() + b"\\n\\n"
                self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
        self.wfile.write(b"0\\r\\n\\r\\n")
        self.close_connection = True

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def llama_peer(tmp_path: Path, settings: PeerSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peer]:
    program = tmp_path / "llama-server"
    program.write_text(FAKE_LLAMA_SERVER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER", str(program))
    peer = llama_server.Peer(replace(settings, gguf="tiny.gguf"))
    yield peer
    os.kill(peer.pid, signal.SIGKILL)


def test_llama_servers_stream_is_counted_by_its_own_count(llama_peer: Peer) -> None:
    heard: list[int] = []
    run = llama_peer.run(WORKLOAD, heard.append)
    check(run, heard)
    assert run.steps == 12
    assert llama_peer.versions == {"llama.cpp": "42 (fake)", "weights": "tiny.gguf"}
    assert run.times[0].arrivals[0] == run.times[0].arrivals[1]  # they came in one message


def test_tokens_beyond_what_was_asked_for_do_not_count() -> None:
    heard: list[int] = []
    arrivals = Arrivals([Request([1], 3)], heard.append)
    arrivals.add(0, 2)
    arrivals.add(0, 5)
    arrivals.add(0)
    assert len(arrivals.times()[0].arrivals) == 3
    assert heard == [2, 1]


def test_workloads_and_runs_survive_the_way_between_processes() -> None:
    assert read_workload(write_workload(WORKLOAD)) == WORKLOAD
    run = PeerRun([RequestTimes(0.5, [1.0, 2.0], "short")], steps=3)
    assert (
        read_run(
            json.loads(json.dumps({"times": [{"submitted": 0.5, "arrivals": [1.0, 2.0], "kind": "short"}], "steps": 3}))
        )
        == run
    )


def test_a_peer_is_offered_only_where_its_needs_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PEERS["transformers-generate-batch"].interpreter() == sys.executable
    assert replace(PEERS["transformers-generate-batch"], packages=("no_such_package",)).interpreter() is None
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.setenv("PATH", "")
    assert PEERS["llama.cpp-bf16"].interpreter() is None


@pytest.mark.parametrize(
    ("form", "matrices", "embedding", "error"),
    [("bf16", "BF16", "BF16", 2**-8), ("q8_0", "Q8_0", "Q8_0", 1 / 127), ("q4_0", "Q4_0", "Q8_0", 0.13)],
)
def test_a_copy_has_the_same_metadata_and_rounded_matrices(
    form: str, matrices: str, embedding: str, error: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGODA_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "tiny.gguf"
    tiny = tiny_model("llama")
    tiny.quantisation = gguf.GGMLQuantizationType.Q8_0
    tiny.write(source)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(copied_gguf(source, form))
    names = [name for name in before.fields if not name.startswith("GGUF.") and name != "general.file_type"]
    assert names
    for name in names:
        assert after.fields[name].contents() == before.fields[name].contents()
    ours = {tensor.name: tensor for tensor in after.tensors}
    for tensor in before.tensors:
        copy = ours[tensor.name]
        assert list(copy.shape) == list(tensor.shape)
        exact = dequantize(tensor.data, tensor.tensor_type)
        if exact.ndim == 1:
            assert copy.tensor_type.name == "F32"
            np.testing.assert_array_equal(copy.data, exact)
        else:
            is_embedding = tensor.name in ("token_embd.weight", "output.weight")
            assert copy.tensor_type.name == (embedding if is_embedding else matrices)
            allowed = error * np.abs(exact).max(
                axis=-1, keepdims=True
            )  # relative to a row's largest value, which bounds those of its groups
            assert np.all(np.abs(dequantize(copy.data, copy.tensor_type) - exact) <= allowed)
