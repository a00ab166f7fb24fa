"""The adapters' protos against those of their owners: same names, numbers and types."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor

from pagoda_server.router.adapters.protocols import kserve_pb2, smg_common_pb2, vllm_engine_pb2
from tests.counterparts.environments import python_with

pytestmark = pytest.mark.counterpart
SMG = ("smg", "smg==1.13.0", "smg-grpc-proto==0.4.28")
TRITON = ("triton", "tritonclient[grpc]==2.73.0")


def declared(file: descriptor_pb2.FileDescriptorProto) -> set[tuple[object, ...]]:
    """Each field and method of a file, as it is on the wire."""
    found: set[tuple[object, ...]] = set()

    def add(message: descriptor_pb2.DescriptorProto, path: str) -> None:
        for field in message.field:
            oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
            kind = (field.type, field.type_name.removeprefix(f".{file.package}."), field.label)
            found.add((f"{path}.{field.name}", field.number, *kind, oneof))
        for nested in message.nested_type:
            add(nested, f"{path}.{nested.name}")

    for message in file.message_type:
        add(message, message.name)
    for service in file.service:
        for method in service.method:
            kinds = (method.input_type, method.output_type, method.client_streaming, method.server_streaming)
            found.add((f"{service.name}/{method.name}", *kinds))
    return found


@pytest.mark.parametrize(
    ("environment", "module", "ours"),
    [
        (SMG, "smg_grpc_proto.generated.vllm_engine_pb2", vllm_engine_pb2.DESCRIPTOR),
        (SMG, "smg_grpc_proto.generated.common_pb2", smg_common_pb2.DESCRIPTOR),
        (TRITON, "tritonclient.grpc.service_pb2", kserve_pb2.DESCRIPTOR),
    ],
)
def test_what_we_declare_is_declared_there(environment: tuple[str, ...], module: str, ours: FileDescriptor) -> None:
    python: Path = python_with(*environment)
    script = f"import base64, {module} as m; print(base64.b64encode(m.DESCRIPTOR.serialized_pb).decode())"
    printed = subprocess.run([python, "-c", script], capture_output=True, check=True, text=True, timeout=120)
    theirs = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(printed.stdout))
    own = descriptor_pb2.FileDescriptorProto.FromString(ours.serialized_pb)
    assert own.package == theirs.package
    assert declared(own) - declared(theirs) == set()
    assert declared(own)
