"""Reflection, with which grpcurl and others need no proto file: grpc.reflection.v1 and the v1alpha before it.

Both have the same messages under two names, so one handler serves both; grpcio-reflection knows only the older name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from ..request.admission import Admission
from ..request.client_call import Context
from ..request.output import ClientWriter
from ..request.receiving import SMALL_BYTES
from ..tenants.caller import caller

OLD, NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
NEW_FILE = "grpc/reflection/v1/reflection.proto"
MAX_STREAMS = 64  # calls at once
IDLE_S = 60.0  # a call ends if its client asks nothing for so long


def add_reflection(services: Sequence[str], server: grpc.aio.Server, stall_timeout_s: float) -> None:
    """Serve the descriptors of these services, and of reflection itself, under both names."""
    _describe_new()
    names = [f"{package}.ServerReflection" for package in (NEW, OLD)]
    answers = reflection.aio.ReflectionServicer([*services, *names])
    streams = Admission(MAX_STREAMS, max_tokens=1)

    async def info(_: object, context: Context) -> None:
        with streams.reserve(caller().tenant) as reservation:
            reservation.starts()
            async with ClientWriter(context, stall_timeout_s) as writer:
                async for response in answers.ServerReflectionInfo(_requests(context), context):
                    await writer.write(response)

    serialize = reflection_pb2.ServerReflectionResponse.SerializeToString
    handlers = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(info, None, serialize)}
    for name in names:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


async def _requests(context: Context) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    """A call's messages. One that is malformed or too long counts as empty, which the service refuses."""
    while True:
        try:
            async with asyncio.timeout(IDLE_S):
                raw = await context.read()
        except TimeoutError:
            return
        if raw is grpc.aio.EOF:
            return
        try:
            request = reflection_pb2.ServerReflectionRequest.FromString(raw if len(raw) <= SMALL_BYTES else b"")
        except DecodeError:
            request = reflection_pb2.ServerReflectionRequest()
        yield request


def _describe_new() -> None:
    """Describe v1, which is v1alpha by another name."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(NEW_FILE)
    except KeyError:
        old, new = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(old)
        text_format.Parse(text_format.MessageToString(old).replace(OLD, NEW), new)
        new.name = NEW_FILE
        pool.AddSerializedFile(new.SerializeToString())
