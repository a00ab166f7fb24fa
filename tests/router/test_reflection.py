"""Reflection under both names, to real programs and to hostile clients."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from pagoda_server.router.process.reflection import MAX_STREAMS, NEW, OLD
from tests.servers import Server

PACKAGES = pytest.mark.parametrize("package", [NEW, OLD])
SERVICES = {
    "pagoda.v1.Inference",
    "pagoda.v1.Control",
    "pagoda.v1.Admin",
    "grpc.health.v1.Health",
    "vllm.grpc.engine.VllmEngine",
    "inference.GRPCInferenceService",
    f"{NEW}.ServerReflection",
    f"{OLD}.ServerReflection",
}


def call(channel: grpc.Channel, package: str, requests: Any) -> Any:
    method = f"/{package}.ServerReflection/ServerReflectionInfo"
    return channel.stream_stream(method, lambda raw: raw, reflection_pb2.ServerReflectionResponse.FromString)(
        requests, timeout=60
    )


def ask(channel: grpc.Channel, package: str, *requests: bytes | dict[str, Any]) -> list[Any]:
    raw = (
        each if isinstance(each, bytes) else reflection_pb2.ServerReflectionRequest(**each).SerializeToString()
        for each in requests
    )
    return list(call(channel, package, raw))


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which(program, path=str(Path(sys.executable).parent))
    assert path, f"{program} is not installed"
    return subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)


@PACKAGES
def test_both_names_list_and_describe_every_service(channel: grpc.Channel, package: str) -> None:
    (listed,) = ask(channel, package, {"list_services": "*"})
    assert {service.name for service in listed.list_services_response.service} == SERVICES
    answers = ask(channel, package, *({"file_containing_symbol": name} for name in sorted(SERVICES)))
    for name, answer in zip(sorted(SERVICES), answers, strict=True):
        raw = answer.file_descriptor_response.file_descriptor_proto
        files = [descriptor_pb2.FileDescriptorProto.FromString(each) for each in raw]
        assert name in {f"{file.package}.{service.name}" for file in files for service in file.service}


@PACKAGES
def test_buf_describes_and_calls_with_no_proto_file(synthetic_server: Server, package: str) -> None:
    """buf speaks both; it tries v1 first unless it is told otherwise."""
    told = ["--reflect-protocol", "grpc-v1alpha"] if package == OLD else []
    curl = ["curl", "--protocol", "grpc", "--http2-prior-knowledge", "--verbose", *told]
    listed = run("buf", *curl, "--list-services", f"http://{synthetic_server.address}")
    assert set(listed.stdout.split()) == SERVICES, listed.stderr
    assert f"POST /{package}.ServerReflection/ServerReflectionInfo" in listed.stderr
    called = run(
        "buf", *curl, "-d", '{"prompt": "asked by buf", "stopping": {"maxTokens": 2}}',
        f"http://{synthetic_server.address}/pagoda.v1.Inference/Generate",
    )  # fmt: skip
    assert '"completionTokens": 2' in called.stdout, called.stderr


def test_grpcurl_describes_an_adapter_and_reflection_itself(synthetic_server: Server) -> None:
    for symbol, method in (
        ("inference.GRPCInferenceService", r"rpc ModelStreamInfer"),
        (f"{NEW}.ServerReflection", rf"stream \.{NEW}\.ServerReflectionRequest"),
    ):
        described = run("grpcurl", "-plaintext", synthetic_server.address, "describe", symbol)
        assert re.search(method, described.stdout), described.stderr


@PACKAGES
def test_hostile_messages_get_the_services_own_error_and_the_call_goes_on(
    channel: grpc.Channel, synthetic_server: Server, package: str
) -> None:
    before = synthetic_server.log.read_text()
    hostile: list[bytes | dict[str, Any]] = [
        b"\xff",
        b"",
        {"file_containing_symbol": "x" * 100_000},
        {"file_containing_symbol": "..\0"},
        {"file_by_filename": "../../../etc/passwd"},
        {"file_containing_extension": {"containing_type": "pagoda.v1.Chat", "extension_number": -1}},
        {"all_extension_numbers_of_type": "no.such.Type"},
    ]
    *errors, last = ask(channel, package, *hostile, {"list_services": ""})
    codes = [error.error_response.error_code for error in errors]
    invalid, not_found = (code.value[0] for code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND))
    assert codes == [invalid] * 3 + [not_found] * 4
    assert len(last.list_services_response.service) == len(SERVICES)
    assert "Traceback" not in synthetic_server.log.read_text()[len(before) :]


def test_calls_are_bounded(channel: grpc.Channel) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()

    def silent_after_one() -> Any:
        yield request
        stop.result()

    stop: futures.Future[None] = futures.Future()
    calls = [call(channel, NEW, silent_after_one()) for _ in range(MAX_STREAMS)]
    try:
        assert all(next(each).list_services_response.service for each in calls)
        with pytest.raises(grpc.RpcError) as caught:
            ask(channel, OLD, request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    finally:
        stop.set_result(None)
    assert [list(each) for each in calls] == [[]] * MAX_STREAMS
