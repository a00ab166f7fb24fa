"""A real Prometheus scrapes a real server with two routers, and knows what its clients did."""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from pagoda.v1 import inference_pb2, inference_pb2_grpc
from tests.counterparts.environments import program
from tests.end_to_end.asking import Answer, request
from tests.servers import ROOT, Server, running_server

pytestmark = pytest.mark.counterpart

PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "pagoda.json"
PROMPT = "abcde"  # the synthetic model's tokens are bytes
LENGTHS = (20, 40, 60, 80)
PLACES = 12
SCRAPE_S = 0.5


@dataclass
class Load:
    """What clients did and saw."""

    finished: int = 0
    embedded: int = 0
    tokens: int = 0
    refused: int = 0
    cancelled: int = 0
    total_s: float = 0.0
    first_s: float = 0.0


def generate(server: Server, max_tokens: int, load: Load) -> None:
    with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        grpc.channel_ready_future(channel).result(timeout=120)
        began = time.monotonic()
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT, max_tokens), timeout=60)
        responses = [next(call)]
        load.first_s += time.monotonic() - began
        answer = Answer([*responses, *call])
        load.total_s += time.monotonic() - began
        load.finished += 1
        load.tokens += len(answer.ids())


def embed(server: Server, load: Load) -> None:
    with grpc.insecure_channel(server.address) as channel:
        message = inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text=PROMPT)])
        inference_pb2_grpc.InferenceStub(channel).Embed(message, timeout=60, wait_for_ready=True)
        load.embedded += 1


def fill_and_be_refused(server: Server, load: Load) -> None:
    """Take all places with long streams, be refused beyond them, and cancel."""
    with contextlib.ExitStack() as stack:
        calls: list[Any] = []
        while load.refused < 3:
            channel = stack.enter_context(
                grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
            )
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request(PROMPT, 30_000), timeout=60)
            try:
                next(call)
                calls.append(call)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                load.refused += 1
        for call in calls:
            call.cancel()
        load.cancelled = len(calls)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(
        "--model", "synthetic", "--step-ms", "2", "--workers", "2", "--http", "127.0.0.1:0",
        "--max-requests", str(PLACES),
    ) as server:  # fmt: skip
        yield server


class Prometheus:
    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(
            f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30
        ) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float:
        """The value of a query with one result; NaN without one."""
        results = self.query(expression)
        assert len(results) <= 1, results
        return float(results[0]["value"][1]) if results else math.nan

    def wait_for(self, expression: str, value: float) -> None:
        deadline = time.monotonic() + 120
        while (found := self.value(expression)) != value:
            assert time.monotonic() < deadline, f"{expression} is {found}, not {value}"
            time.sleep(SCRAPE_S / 2)


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with our configuration, at this server and in shorter intervals."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S * 1e3:.0f}ms", "scrape_timeout": f"{SCRAPE_S * 1e3:.0f}ms"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server.http.removeprefix("http://")]}]
    config["rule_files"] = [str(PROMETHEUS / "rules.yml")]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    command = [
        program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            prometheus = Prometheus(address)
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError):
                    if prometheus.value("up") == 1:
                        break
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
            yield prometheus
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def load(server: Server, prometheus: Prometheus) -> Load:
    load = Load()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda length: generate(server, length, load), LENGTHS * 3))
    for _ in range(4):
        embed(server, load)
    fill_and_be_refused(server, load)
    return load


def scrape(server: Server, accept: str = "") -> str:
    asked = urllib.request.Request(f"{server.http}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        page: str = answer.read().decode()
        return page


def promtool(*arguments: str, given: str = "") -> tuple[int, list[str]]:
    """The exit code and what it printed."""
    result = subprocess.run(
        [program("promtool"), *arguments], input=given, capture_output=True, text=True, check=False, cwd=PROMETHEUS
    )
    return result.returncode, (result.stdout + result.stderr).splitlines()


def test_prometheus_knows_what_the_clients_did(prometheus: Prometheus, load: Load) -> None:
    prometheus.wait_for('sum(pagoda_calls_total{code="CANCELLED"})', load.cancelled)
    assert load.finished == 3 * len(LENGTHS)
    assert load.tokens == 3 * sum(LENGTHS)
    assert load.cancelled >= PLACES / 2, "each router has half of the places"
    prometheus.wait_for('sum(pagoda_calls_total{code="OK", method="Generate"})', load.finished)
    prometheus.wait_for('sum(pagoda_calls_total{code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL"})', load.refused)
    for names in ("vllm:", "pagoda_"):
        lengths = load.finished + load.embedded  # what an embedding's sequence chooses is dropped
        assert prometheus.value(f'{names}request_success_total{{finished_reason="length"}}') == lengths
        assert prometheus.value(f'{names}request_success_total{{finished_reason="abort"}}') == load.cancelled
        assert prometheus.value(f"{names}request_generation_tokens_sum") == load.tokens
        for method, count in {"Generate": load.finished, "Embed": load.embedded}.items():
            prompts = prometheus.value(f'{names}request_prompt_tokens_sum{{method="{method}"}}')
            assert prompts == len(PROMPT) * count
        assert prometheus.value(f"{names}time_to_first_token_seconds_count") == load.finished + load.cancelled
        prompts = load.finished + load.cancelled + load.embedded
        assert prometheus.value(f"{names}prompt_tokens_total") == len(PROMPT) * prompts
        assert prometheus.value(f"{names}generation_tokens_total") >= load.tokens + load.cancelled
        assert prometheus.value(f"{names}inter_token_latency_seconds_count") >= 0.8 * load.tokens
        prometheus.wait_for(f"{names}num_requests_running", 0)  # an engine says so less often than it makes steps
        prometheus.wait_for(f"{names}kv_cache_usage_perc", 0)


def test_times_are_those_that_the_clients_saw(prometheus: Prometheus, load: Load) -> None:
    """A client sees what the server measures, and the time that messages take to it and from it."""
    whole, generated = "vllm:e2e_request_latency_seconds", '{method="Generate"}'
    total_s = prometheus.value(f"{whole}_sum{generated}")
    assert total_s < load.total_s < total_s + 0.2 * load.finished
    parts = [f"vllm:request_{part}_time_seconds_sum{generated}" for part in ("queue", "prefill", "decode")]
    assert 0.5 * total_s < sum(map(prometheus.value, parts)) <= total_s
    gap_s = prometheus.value("vllm:inter_token_latency_seconds_sum / vllm:inter_token_latency_seconds_count")
    assert 0.002 < gap_s < 0.1, "a step takes 2 ms or more"
    median_s = prometheus.value(f"histogram_quantile(0.5, sum by (le) ({whole}_bucket{generated}))")
    assert 0.02 <= median_s <= 5
    assert prometheus.value('process_cpu_seconds_total{router="1"}') > 0


def test_every_query_of_the_dashboard_has_an_answer(prometheus: Prometheus, load: Load) -> None:
    time.sleep(2 * SCRAPE_S)  # a rate needs two scrapes after the load
    dashboard = json.loads(DASHBOARD.read_text())
    own = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = re.sub(r"\$\w+", lambda found: own[found[0]], target["expr"])
            assert prometheus.query(expression), f"{panel['title']}: {expression}"


def test_prometheus_takes_every_series_with_its_type_and_help(prometheus: Prometheus, server: Server) -> None:
    known = prometheus.ask("metadata")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", scrape(server), re.MULTILINE))
    assert len(types) > 60
    for name, kind in types.items():
        (told,) = known[name.removesuffix("_total")]  # Prometheus asks for OpenMetrics, which names counters so
        assert told["type"] == kind
        assert told["help"]
    assert set(types) <= {re.sub("_(bucket|sum|count)$", "", name) for name in prometheus.ask("label/__name__/values")}


def test_the_alert_rules_are_loaded_and_none_is_raised_by_this_load(prometheus: Prometheus, load: Load) -> None:
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) >= 8
    assert [rule["name"] for rule in rules if rule["health"] == "err" or rule["state"] == "firing"] == []


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_promtool_finds_nothing_wrong_with_our_names_and_only_the_colon_with_vllms(
    server: Server, load: Load, accept: str
) -> None:
    assert load.finished
    page = scrape(server, accept)
    if accept:  # promtool reads the text format alone
        assert page.endswith("# EOF\n")
        names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")}
        samples = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
        assert names <= {re.sub("_(bucket|sum|count|total)$", "", name) for name in samples}
        return
    lines = page.splitlines(keepends=True)
    ours = "".join(line for line in lines if "vllm:" not in line)
    assert promtool("check", "metrics", given=ours) == (0, [])
    code, said = promtool("check", "metrics", given="".join(line for line in lines if "vllm:" in line))
    assert said
    assert {line.partition(" ")[2] for line in said} == {"metric names should not contain ':'"}
    assert code == 3


def test_promtool_accepts_the_configuration_and_the_rules_and_their_tests_pass() -> None:
    for arguments in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "--lint=all", "--lint-fatal", "rules.yml"),
        ("test", "rules", "rules_test.yml"),
    ):
        code, said = promtool(*arguments)
        assert code == 0, "\n".join(said)
