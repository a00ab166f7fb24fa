"""Several engines behind one router, as real processes: they join, leave, and are chosen by their load."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from pagoda.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from pagoda_server.engine.runners.synthetic import expected_tokens
from pagoda_server.runtime.authority import Authority
from tests.end_to_end.asking import Answer, ask, request
from tests.servers import free_address, running_engine, running_server

pytestmark = pytest.mark.thorough

MODEL = ("--model", "synthetic")
ENGINE = (*MODEL, "--step-ms", "10")
INFO = control_pb2.GetServerInfoRequest()
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
LOAD = control_pb2.GetLoadRequest()


@contextlib.contextmanager
def router(
    engines: str, *options: str
) -> Iterator[tuple[inference_pb2_grpc.InferenceStub, control_pb2_grpc.ControlStub]]:
    arguments = (*MODEL, "--engine", engines, *options)
    with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)


def until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> float:
    """Wait until something is so; return how many seconds that took."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - began


def test_engines_join_and_leave_a_running_router_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    addresses = {name: f"unix:{tmp_path / name}.sock" for name in ("red", "blue")}

    def write(*names: str) -> None:
        entries = [{"name": name, "address": addresses[name]} for name in names]
        path.with_suffix(".new").write_text(json.dumps({"engines": entries}))
        path.with_suffix(".new").rename(path)

    def ready() -> list[tuple[int, str]]:
        return [(each.engine, each.name) for each in control.GetLoad(LOAD).engines]

    write("red")
    with (
        running_engine(addresses["red"], *ENGINE),
        running_engine(addresses["blue"], *ENGINE),
        router(f"file:{path}") as (inference, control),
    ):
        until(lambda: Path(addresses["blue"].removeprefix("unix:")).exists())
        assert ready() == [(0, "red")]
        stream = inference.Generate(request("stays", max_tokens=400))
        first = next(stream)
        write("red", "blue")
        assert until(lambda: ready() == [(0, "red"), (1, "blue")]) < 2
        write("blue")
        until(lambda: ask(inference, request("new", max_tokens=1)) and control.GetLoad(LOAD).engines[1].steps > 0)
        assert Answer([first, *stream]).ids() == expected_tokens(b"stays", 400, 258), "it ends where it began"
        until(lambda: ready() == [(1, "blue")])
        assert [each.name for each in control.GetServerInfo(INFO).engines] == ["blue"]
        assert ask(inference, request("after", max_tokens=3)).ids() == expected_tokens(b"after", 3, 258)


def test_a_router_counts_the_sequences_of_other_routers(tmp_path: Path) -> None:
    """Two routers share two engines: what one sends goes where the other has sent nothing."""
    engines = ",".join(addresses := [f"unix:{tmp_path / name}.sock" for name in ("one", "two")])
    with contextlib.ExitStack() as stack:
        for address in addresses:
            stack.enter_context(running_engine(address, *ENGINE))
        first, _ = stack.enter_context(router(addresses[0]))
        # Other rules also weigh how long prompts take, which a busy machine decides.
        inference, control = stack.enter_context(router(engines, "--choose", "load"))
        until(lambda: len(control.GetLoad(LOAD).engines) == 2)
        held = [first.Generate(request(f"held {at}", max_tokens=2000)) for at in range(4)]
        for each in held:
            next(each)
        until(lambda: [each.running for each in control.GetLoad(LOAD).engines] == [4, 0])
        calls = [inference.Generate(request(f"call {at}", max_tokens=2000)) for at in range(4)]
        for each in calls:
            next(each)
        until(lambda: [each.running for each in control.GetLoad(LOAD).engines] == [4, 4])
        for each in (*held, *calls):
            each.cancel()


@pytest.fixture
def two_hosts() -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str, Callable[[str], None]]]:
    """Two network namespaces with a cable between them: what runs commands there, an address, a switch."""
    names = [f"pagoda-{side}-{os.getpid()}" for side in ("one", "two")]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def set_cable(state: str) -> None:
        ip("-n", names[1], "link", "set", "cable", state)

    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need ip and the rights to use it: {error}")
        for name, address in zip(names, ("10.1.1.1/24", "10.1.1.2/24"), strict=True):
            ip("-n", name, "address", "add", address, "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        inside = [("ip", "netns", "exec", name) for name in names]
        yield inside[0], inside[1], "10.1.1.2:50052", set_cable
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_link_that_is_cut_is_noticed_at_both_ends(
    tmp_path: Path, two_hosts: tuple[Any, Any, str, Callable[[str], None]], is_busy: bool
) -> None:
    here, there, address, set_cable = two_hosts
    listen = ("--listen", f"unix:{tmp_path / 'router.sock'}")
    with (
        running_engine(address, *ENGINE, "--allow-insecure", inside=there),
        running_server(*MODEL, "--engine", address, *listen, inside=here) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
        if is_busy:
            stream = inference.Generate(request("cut", max_tokens=20_000))
            next(stream)
        set_cable("down")
        assert until(lambda: server.health() == NOT_SERVING) < 8
        if is_busy:
            with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
                list(stream)
        time.sleep(8)
        set_cable("up")
        server.wait_ready(30)
        assert ask(inference, request("after", max_tokens=3)).ids() == expected_tokens(b"after", 3, 258)
        assert [each.running for each in control.GetLoad(LOAD).engines] == [0], "the engine has missed the router, too"


def test_engines_of_one_model_in_two_precisions_serve_together_only_if_asked_to(tmp_path: Path) -> None:
    names = ("one", "two", "other")
    addresses = [f"unix:{tmp_path / name}" for name in names]
    model = ("--model", "smollm2-135m-instruct")
    ready, refused = control_pb2.ENGINE_STATE_READY, control_pb2.ENGINE_STATE_REFUSED
    with contextlib.ExitStack() as stack:
        for address, quantization in zip(addresses, ("int8", "int8", "none"), strict=True):
            engine = (*model, "--quantization", quantization, "--kv-cache-gb", "0.05")
            stack.enter_context(running_engine(address, *engine))
        until(lambda: all((tmp_path / name).exists() for name in names))  # they vote
        for options, expected in (((), refused), (("--mixed-engines",), ready)):
            arguments = (*model, "--engine", ",".join(addresses), *options)
            with running_server(*arguments) as server, grpc.insecure_channel(server.address) as channel:
                control = control_pb2_grpc.ControlStub(channel)

                def states(control: control_pb2_grpc.ControlStub = control) -> list[int]:
                    return [each.state for each in control.GetServerInfo(INFO).engines]

                def are_as_expected(expected: int = expected, states: Callable[[], list[int]] = states) -> bool:
                    return states() == [ready, ready, expected]

                until(are_as_expected)
                one, _, other = control.GetServerInfo(INFO).engines
                if expected == refused:
                    assert "unquantized weights" in other.refused
                    assert one.refused == ""
                    assert server.log.read_text().count("is not used") == 1
                else:
                    assert one.info.weights_fingerprint == other.info.weights_fingerprint
                    assert len(one.info.weights_fingerprint) == 64
                    assert one.info.precision != other.info.precision


def test_prompts_go_to_the_engine_that_has_them_cached(tmp_path: Path) -> None:
    """Two routers, of which the second one learns from the engines alone what the first one has sent where."""
    engines = ",".join(addresses := [f"unix:{tmp_path / name}.sock" for name in ("one", "two")])
    prompts = [f"{at:>3}" * 100 for at in range(6)]

    def cached_tokens(inference: inference_pb2_grpc.InferenceStub, prompt: str) -> int:
        answer = ask(inference, request(prompt, max_tokens=2))
        assert answer.ids() == expected_tokens(prompt.encode(), 2, 258)
        return int(answer.responses[-1].usage.cached_tokens)

    with contextlib.ExitStack() as stack:
        for address in addresses:
            stack.enter_context(running_engine(address, *ENGINE))
        first, control = stack.enter_context(router(engines))
        second, _ = stack.enter_context(router(engines))
        until(lambda: len(control.GetLoad(LOAD).engines) == 2)
        time.sleep(0.5)
        for prompt in prompts:
            cached_tokens(first, prompt)
        assert all(each.prompt_tokens for each in control.GetLoad(LOAD).engines), "both have some"
        time.sleep(1)  # until both routers know
        for inference in (second, first):
            assert min(cached_tokens(inference, prompt) for prompt in prompts for _ in range(2)) >= 256


LENDING = (*ENGINE, "--host-kv-gb", "1e-3", "--max-num-seqs", "8")
SHARED = "a prompt that many requests begin with, and that is long enough to be fetched. " * 8  # 640 tokens


def lent_and_fetched(control: control_pb2_grpc.ControlStub) -> tuple[list[int], list[int]]:
    loads = control.GetLoad(LOAD).engines
    return [each.lent_tokens for each in loads], [each.fetched_tokens for each in loads]


def fill_the_engine_that_has_it(
    inference: inference_pb2_grpc.InferenceStub, control: control_pb2_grpc.ControlStub, text: str
) -> list[Any]:
    """Ask for streams that begin alike until an engine that did not have their prompt cached gets one."""
    ask(inference, request(text, max_tokens=1))
    until(lambda: any(each.prompt_tokens for each in control.GetLoad(LOAD).engines))
    time.sleep(1)  # until the router knows what is cached
    calls = []
    for at in range(12):
        calls.append(inference.Generate(request(f"{text}{at}", max_tokens=300)))
        next(calls[-1])
        if all(each.running for each in control.GetLoad(LOAD).engines):
            break
    return calls


def certificates(fleet: Path, name: str) -> list[str]:
    files = {"cert": f"{name}.pem", "key": f"{name}.key", "ca": "ca.pem"}
    return [f"--channel-tls-{option}={fleet / file}" for option, file in files.items()]


@pytest.mark.parametrize("guard", ["nothing", "a token", "certificates"])
def test_an_engine_fetches_the_prompt_that_another_one_has_cached(tmp_path: Path, guard: str) -> None:
    """Over a Unix socket, and over TCP with the channel's token or with certificates of `pagoda certs`."""
    (tmp_path / "token").write_text("s3cret")
    addresses = [free_address(), free_address()]
    trust_of_engines = trust = ["--channel-token-file", str(tmp_path / "token")]
    if guard == "nothing":
        addresses, trust_of_engines, trust = [f"unix:{tmp_path / name}.sock" for name in ("one", "two")], [], []
    elif guard == "certificates":
        Authority(tmp_path / "fleet", days=1).add(["engine"])
        trust_of_engines = certificates(tmp_path / "fleet", "engine")
        trust = [*certificates(tmp_path / "fleet", "router"), "--channel-tls-name=pagoda-engine"]
    with contextlib.ExitStack() as stack:
        for address in addresses:
            stack.enter_context(running_engine(address, *LENDING, *trust_of_engines))
        server = stack.enter_context(running_server(*MODEL, "--engine", ",".join(addresses), *trust))
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        inference, control = inference_pb2_grpc.InferenceStub(channel), control_pb2_grpc.ControlStub(channel)
        until(lambda: len(control.GetLoad(LOAD).engines) == 2)
        calls = fill_the_engine_that_has_it(inference, control, SHARED)
        until(lambda: sum(lent_and_fetched(control)[1]) > 0)
        lent, fetched = lent_and_fetched(control)
        assert sorted(lent) == sorted(fetched)
        assert lent != fetched, "one has lent, the other one has fetched"
        assert max(fetched) >= 512
        for at, call in enumerate(calls):
            tokens = [token.id for response in call for token in response.tokens.tokens]
            assert tokens == expected_tokens(f"{SHARED}{at}".encode(), 300, 258)[-len(tokens) :]


def test_a_lender_that_stands_still_delays_a_stream_and_changes_no_token(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path / name}.sock" for name in ("one", "two")]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(running_engine(address, *LENDING)) for address in addresses]
        inference, control = stack.enter_context(router(",".join(addresses)))
        until(lambda: len(control.GetLoad(LOAD).engines) == 2)
        ask(inference, request(SHARED, max_tokens=1))
        until(lambda: any(each.prompt_tokens for each in control.GetLoad(LOAD).engines))
        has_it = [each.prompt_tokens > 0 for each in control.GetLoad(LOAD).engines].index(True)
        time.sleep(1)
        engines[has_it].send_signal(signal.SIGSTOP)
        try:
            time.sleep(2)  # until the router takes it for late, and sends nothing there
            answer = ask(inference, request(f"{SHARED}!", max_tokens=20))
        finally:
            engines[has_it].send_signal(signal.SIGCONT)
        assert answer.ids() == expected_tokens(f"{SHARED}!".encode(), 20, 258)
