"""Several models behind one router, as real processes: each request gets the model that it names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client.parser import text_string_to_metric_families

from pagoda.v1 import chat_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagoda_server.checkpoints import find_model
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.router.text.tokenizer import Tokenizer
from tests.end_to_end.asking import Answer, request
from tests.real_models import qwen_gguf
from tests.servers import ROOT, Server, running_engine, running_server

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(400)]

VOCAB = {"synthetic": 258, "wide": 300, "tuned": 270}
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = b"once"


def made(folder: Path, name: str) -> Path:
    """A synthetic model with a vocabulary of its own; `wide` has a tokenizer of its own and no chat template, too."""
    made = folder / name
    shutil.copytree(find_model("synthetic").folder, made)
    config = json.loads((made / "config.json").read_text()) | {"vocab_size": VOCAB[name]}
    (made / "config.json").write_text(json.dumps(config))
    if name == "wide":
        tokenizer = json.loads((made / "tokenizer.json").read_text())
        (made / "tokenizer.json").write_text(json.dumps(tokenizer))
        (made / "chat_template.jinja").unlink()
    return made


@dataclass
class Models:
    server: Server
    engines: dict[str, subprocess.Popen[str]]
    inference: inference_pb2_grpc.InferenceStub
    control: control_pb2_grpc.ControlStub
    metadata: tuple[tuple[str, str], ...] = ()

    def stream(self, model: str, tokens: int = 5) -> Any:
        asked = request(PROMPT.decode(), tokens)
        asked.model = model
        return self.inference.Generate(asked, timeout=120, metadata=self.metadata)

    def ids(self, model: str, tokens: int = 5) -> list[int]:
        return Answer(list(self.stream(model, tokens))).ids()

    def refusal(self, model: str) -> Any:
        with pytest.raises(grpc.RpcError) as caught:
            self.ids(model)
        return caught.value

    def http(self, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.server.http + path, data), timeout=120) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def listed(self) -> list[tuple[str, bool]]:
        try:
            answer = self.control.ListModels(control_pb2.ListModelsRequest(), metadata=self.metadata)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return []  # this router has no engine yet
        return [(each.name, each.ready) for each in answer.models]

    def until_listed(self, *expected: tuple[str, bool]) -> None:
        deadline = time.monotonic() + 60
        while self.listed() != [*expected]:
            assert time.monotonic() < deadline, f"{self.listed()}, not {expected}"
            time.sleep(0.05)


@contextlib.contextmanager
def serving(
    folder: Path, *arguments: str, engines: tuple[str, ...] = ("synthetic", "wide"), token: str = ""
) -> Iterator[Models]:
    """A router of three models, and these engines, each called by the model that it has."""
    paths = {name: made(folder, name) for name in ("wide", "tuned")}
    paths["synthetic"] = find_model("synthetic").folder
    with contextlib.ExitStack() as stack:
        started, listed = {}, []
        for at, name in enumerate(engines):
            listed.append(f"{name}{at}=unix:{folder / str(at)}.sock")
            options = ("--model", str(paths[name]), "--step-ms", "5")
            started[f"{name}{at}"] = stack.enter_context(running_engine(listed[-1].partition("=")[2], *options))
        others = f"wide={paths['wide']},{paths['tuned']}"
        options = ("--model", "synthetic", "--also-serve", others, "--engine", ",".join(listed))
        server = stack.enter_context(running_server(*options, "--http", "127.0.0.1:0", *arguments))
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        control = control_pb2_grpc.ControlStub(channel)
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        found = Models(server, started, inference_pb2_grpc.InferenceStub(channel), control, metadata)
        found.until_listed(*((name, name in engines) for name in ("synthetic", "wide", "tuned")))
        yield found


def test_each_request_gets_the_model_that_it_names(tmp_path: Path) -> None:
    with serving(tmp_path, engines=("synthetic", "wide", "tuned")) as models:
        streams = {name: models.stream(name, 100) for name in VOCAB}  # side by side
        for name, vocab in VOCAB.items():
            assert Answer(list(streams[name])).ids() == expected_tokens(PROMPT, 100, vocab), name
        assert models.ids("") == expected_tokens(PROMPT, 5, VOCAB["synthetic"]), "the first one is meant"

        # What a request may say follows its model.
        asked = request(PROMPT.decode(), 2)
        asked.sampling.allowed_token_ids.append(290)
        with pytest.raises(grpc.RpcError, match="token id 290 is not below 258"):
            models.inference.Generate(asked).next()
        asked.model = "wide"
        assert set(Answer(list(models.inference.Generate(asked))).ids()) == {290}
        chat = chat_pb2.Chat(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content="Hi")])
        tokenize = inference_pb2.TokenizeRequest(model="wide", chat=chat)
        with pytest.raises(grpc.RpcError, match="has no chat template"):
            models.inference.Tokenize(tokenize)
        tokenize.model = "tuned"
        assert models.inference.Tokenize(tokenize).token_ids
        embedded = inference_pb2.EmbedRequest(model="wide", inputs=[inference_pb2.EmbedInput(text="Hi")])
        assert models.inference.Embed(embedded).embeddings

        error = models.refusal("other")
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details() == "model: not served here; the served models are synthetic, wide, tuned"


def test_http_names_models_as_grpc_does(tmp_path: Path) -> None:
    with serving(tmp_path) as models:
        status, listed = models.http("/v1/models")
        assert (status, [each["id"] for each in listed["data"]]) == (200, ["synthetic", "wide", "tuned"])
        assert listed["data"][2]["max_model_len"] is None, "no engine has reported it"
        assert models.http("/v1/models/wide")[1]["id"] == "wide"
        assert models.http("/v1/models/tuned")[0] == 503
        body = {"model": "wide", "prompt": "once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        status, answer = models.http("/v1/completions", body)
        assert (status, answer["model"]) == (200, "wide")
        assert models.http("/v1/completions", body | {"model": "synthetic"})[1]["model"] == "synthetic"
        assert models.http("/v1/embeddings", {"model": "wide", "input": "once"})[1]["model"] == "wide"
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        assert models.http("/v1/chat/completions", chat)[1]["model"] == "synthetic"
        assert models.http("/v1/chat/completions", chat | {"model": "wide"})[0] == 400, "it has no chat template"
        for path, asked in (("completions", body), ("chat/completions", chat), ("embeddings", {"input": "once"})):
            status, error = models.http(f"/v1/{path}", asked | {"model": "other"})
            assert status == 404, path
            assert "the served models are synthetic, wide, tuned" in error["error"]["message"]
        status, error = models.http("/v1/completions", body | {"model": "tuned"})
        assert (status, error["error"]["message"]) == (503, "no engine that has the model tuned is ready")

        with urllib.request.urlopen(f"{models.server.http}/metrics", timeout=60) as answer:
            page = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in page for sample in family.samples]
        up = {each.labels["engine"]: each.labels["model_name"] for each in samples if each.name == "pagoda_engine_up"}
        assert up == {"synthetic0": "synthetic", "wide1": "wide"}
        calls = [each.labels for each in samples if each.name == "pagoda_calls_total" and each.labels["code"] == "OK"]
        assert {each["model_name"] for each in calls if each["method"] == "Generate"} >= {"synthetic", "wide"}
        (admitted,) = [each for each in samples if each.name == "pagoda_admitted_requests"]
        assert "model_name" not in admitted.labels, "it is that of all models"


def test_a_model_whose_engine_is_gone_is_unavailable_and_the_others_go_on(tmp_path: Path) -> None:
    with serving(tmp_path) as models:
        for gone, name, other in (("wide1", "wide", "synthetic"), ("synthetic0", "synthetic", None)):
            lost, kept = models.stream(name, 20_000), models.stream(other or name, 300)
            next(lost)
            if other is None:
                kept.cancel()
            models.engines[gone].kill()
            with pytest.raises(grpc.RpcError) as caught:
                list(lost)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "no engine of another model takes it"
            if other is not None:
                assert Answer(list(kept)).ids() == expected_tokens(PROMPT, 300, VOCAB[other])
                models.until_listed(("synthetic", True), ("wide", False), ("tuned", False))
                error = models.refusal(name)
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                assert error.details() == "no engine that has the model wide is ready"
                assert models.ids(other) == expected_tokens(PROMPT, 5, VOCAB[other])
                health = [models.server.health(f"pagoda.v1.Inference/{each}") for each in ("synthetic", "wide")]
                assert (models.server.health(), health) == (SERVING, [SERVING, NOT_SERVING])
        deadline = time.monotonic() + 60
        while models.server.health() != NOT_SERVING:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_stream_goes_on_at_another_engine_of_its_model(tmp_path: Path) -> None:
    with serving(tmp_path, engines=("synthetic", "wide", "wide", "synthetic")) as models:
        streams = [models.stream("wide", 600) for _ in range(4)]
        for stream in streams:
            next(stream)
        loads = {each.name: each.running for each in models.control.GetLoad(control_pb2.GetLoadRequest()).engines}
        assert [loads[name] > 0 for name in ("wide1", "wide2")] == [True, True], "they take turns"
        assert [loads[name] for name in ("synthetic0", "synthetic3")] == [0, 0]
        models.engines["wide1"].send_signal(signal.SIGKILL)
        for stream in streams:
            ids = Answer(list(stream)).ids()
            assert ids == expected_tokens(PROMPT, 600, VOCAB["wide"])[-len(ids) :]
            assert len(ids) >= 590, "the messages that were read above hold the first ones"


def test_a_tenants_quota_holds_over_all_models(tmp_path: Path) -> None:
    path, digest = tmp_path / "tenants.toml", hashlib.sha256(b"small").hexdigest()
    token = f'[[token]]\nsha256 = "{digest}"\ntenant = "small"\nrights = []\n'
    path.write_text(f"[tenant.small]\nmax_requests = 1\n{token}")
    with serving(tmp_path, "--tenants-file", str(path), token="small") as models:
        held = models.stream("synthetic", 20_000)
        next(held)
        assert models.refusal("wide").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        held.cancel()


def test_workers_serve_several_models_and_resume_them(tmp_path: Path) -> None:
    with serving(tmp_path, "--workers", "2") as models:
        for at in range(8):
            with grpc.insecure_channel(models.server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as own:
                inference, control = inference_pb2_grpc.InferenceStub(own), control_pb2_grpc.ControlStub(own)
                replace(models, control=control).until_listed(("synthetic", True), ("wide", True), ("tuned", False))
                asked = request(PROMPT.decode(), 5)
                asked.model, asked.resumable, asked.request_id = "wide", True, f"kept-{at}"
                assert Answer(list(inference.Generate(asked))).ids() == expected_tokens(PROMPT, 5, VOCAB["wide"])
        for at in range(8):
            resumed = models.inference.Resume(inference_pb2.ResumeRequest(request_id=f"kept-{at}", received=[2]))
            assert Answer(list(resumed)).ids() == expected_tokens(PROMPT, 5, VOCAB["wide"])[2:]


def test_an_upgrade_breaks_no_stream_of_any_model(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-connection-age-s", "1") as models:
        streams = {name: models.stream(name, 600) for name in ("synthetic", "wide")}
        heads = {name: next(stream) for name, stream in streams.items()}
        command = [sys.executable, "-m", "pagoda_server.cli", "upgrade", str(models.server.process.pid)]
        subprocess.run(command, check=True, cwd=ROOT, timeout=120)
        for name, stream in streams.items():
            assert models.ids(name, 50) == expected_tokens(PROMPT, 50, VOCAB[name])
            assert Answer([heads[name], *stream]).ids() == expected_tokens(PROMPT, 600, VOCAB[name])
        assert models.listed() == [("synthetic", True), ("wide", True), ("tuned", False)]


def test_two_real_models_with_tokenizers_of_their_own_serve_side_by_side(tmp_path: Path) -> None:
    text = "Hello, wörld! 日本の首都は"
    folders = [find_model(each).folder for each in ("smollm2-135m-instruct", str(qwen_gguf()))]
    small, coder = "smollm2-135m-instruct", "coder"
    addresses = [f"unix:{tmp_path}/{name}.sock" for name in (small, coder)]
    options = ("--deterministic", "--kv-cache-gb", "0.05", "--threads", "1")
    with contextlib.ExitStack() as stack:
        for folder, address in zip(folders, addresses, strict=True):
            stack.enter_context(running_engine(address, "--model", str(folder), *options))
        also = ("--also-serve", f"{coder}={folders[1]}", "--engine", ",".join(addresses))
        server = stack.enter_context(running_server("--model", small, *also))
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
        models = Models(server, {}, inference, control)
        models.until_listed((small, True), (coder, True))
        alone = {}
        for name, folder in zip((small, coder), folders, strict=True):
            asked = inference_pb2.TokenizeRequest(model=name, prompt=text)
            with contextlib.closing(Tokenizer(folder)) as tokenizer:
                assert [*inference.Tokenize(asked).token_ids] == tokenizer.encode(text), name
            alone[name] = models.ids(name, 20)
        assert alone[small] != alone[coder]
        streams = {name: models.stream(name, 20) for name in (small, coder)}
        for name, stream in streams.items():
            assert Answer(list(stream)).ids() == alone[name], "the other one's stream changes nothing"


def test_an_engine_with_a_model_that_is_not_served_is_refused(tmp_path: Path) -> None:
    stranger = made(tmp_path, "tuned")
    config = json.loads((stranger / "config.json").read_text()) | {"vocab_size": 280}
    (stranger / "config.json").write_text(json.dumps(config))
    (tmp_path / "models").mkdir()
    served, addresses = made(tmp_path / "models", "tuned"), [f"unix:{tmp_path / name}.sock" for name in "ab"]
    with (
        running_engine(addresses[0], "--model", "synthetic"),
        running_engine(addresses[1], "--model", str(stranger)),
        running_server("--model", "synthetic", "--also-serve", str(served), "--engine", ",".join(addresses)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        control = control_pb2_grpc.ControlStub(channel)
        deadline = time.monotonic() + 60
        while True:
            known, refused = control.GetServerInfo(control_pb2.GetServerInfoRequest()).engines
            if refused.state == control_pb2.ENGINE_STATE_REFUSED:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert (known.model, refused.model) == ("synthetic", "")
        assert refused.refused == "it serves synthetic, whose weights are none of those of synthetic, tuned"
