"""KServe's tensors and parameters: requests become ours, and values of the answer become tensors."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from pagoda.v1 import inference_pb2

from ...settings.sampling import LOGIT_BIAS, PARAMETERS, Interval
from ..errors import InvalidArgument, NotFound, Unimplemented
from ..request.fields import Limits, check_count, check_integer, check_number, check_size
from ..request.json_body import Json
from ..request.structured_outputs import structured_outputs
from .protocols import kserve_pb2 as kserve
from .translation import named

VERSION = "1"  # of the model: there is only this one
MAX_TENSORS = 16
MAX_PARAMETERS = 64
MAX_DIMENSIONS = 8

# Input tensors, each of one value, and output tensors, each of as many values as there are sequences.
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
_FLOATS = {
    each.name: each.interval
    for each in PARAMETERS
    if each.name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
}
_UINT32, _UINT64 = (1 << 32) - 1, (1 << 64) - 1
_WITHOUT_EFFECT = {"triton_enable_empty_final_response", "binary_data_output"}  # of clients, in `parameters`


def most_entries(limits: Limits) -> Mapping[str, int]:
    """Limits of a request's repeated fields, by full name."""
    request = "inference.ModelInferRequest"
    return {
        f"{request}.inputs": MAX_TENSORS,
        f"{request}.outputs": MAX_TENSORS,
        f"{request}.raw_input_contents": MAX_TENSORS,
        f"{request}.parameters": MAX_PARAMETERS,
        f"{request}.InferInputTensor.shape": MAX_DIMENSIONS,
        f"{request}.InferInputTensor.parameters": MAX_PARAMETERS,
        f"{request}.InferRequestedOutputTensor.parameters": MAX_PARAMETERS,
        "inference.InferTensorContents.bool_contents": MAX_TENSORS,
        "inference.InferTensorContents.bytes_contents": MAX_TENSORS,
    }


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, translated.

    prefix   what the text begins with
    outputs  the tensors to return
    """

    request: inference_pb2.GenerateRequest
    streams: bool
    prefix: str
    outputs: tuple[str, ...]


def asked_from(theirs: kserve.ModelInferRequest, limits: Limits) -> Asked:
    """Translate a request. Raises InvalidArgument, Unimplemented, which name its tensors; NotFound for a version."""
    check_version(theirs.model_version)
    tensors = _tensors(theirs)
    if (prompt := tensors.texts.get("text_input")) is None:
        raise InvalidArgument("text_input", "is missing")
    check_size(len(prompt.encode()), "text_input", limits.max_text_bytes)
    streams = tensors.flags.get("stream", False)
    excludes_input = tensors.flags.get("exclude_input_in_output", streams)
    if streams and not excludes_input:
        raise InvalidArgument("exclude_input_in_output", "is false, which a stream cannot be")
    ours = inference_pb2.GenerateRequest(model=theirs.model_name, prompt=prompt)
    ours.sampling.n = 1
    check_count(len(theirs.parameters), "parameters", MAX_PARAMETERS)
    for key, parameter in theirs.parameters.items():
        if key not in _WITHOUT_EFFECT and (kind := parameter.WhichOneof("parameter_choice")) is not None:
            _Parameter(f"parameters.{named(key)}", getattr(parameter, kind), limits).put(key, ours)
    name = "sampling_parameters"
    for key, value in _json_object(tensors.texts.get(name, "{}"), name, limits).items():
        if value is not None:
            _Parameter(f"{name}.{named(key)}", value, limits).put(key, ours)
    return Asked(ours, streams, "" if excludes_input else prompt, _outputs(theirs, tensors.flags))


def check_version(version: str) -> None:
    if version not in ("", VERSION):
        raise NotFound(f"model_version: not served here; the served version is {VERSION}")


def _outputs(theirs: kserve.ModelInferRequest, flags: Mapping[str, bool]) -> tuple[str, ...]:
    check_count(len(theirs.outputs), "outputs", MAX_TENSORS)
    for output in theirs.outputs:
        if output.name not in OUTPUTS:
            raise Unimplemented(f"outputs.{named(output.name)}")
        if output.parameters:
            raise Unimplemented(f"outputs.{output.name}.parameters")
    asked = {output.name for output in theirs.outputs} or {"text_output"}
    return tuple(name for name in OUTPUTS if name in asked or flags.get(f"return_{name}", False))


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The values of a request's input tensors, by name."""

    texts: dict[str, str]
    flags: dict[str, bool]


def _tensors(theirs: kserve.ModelInferRequest) -> _Tensors:
    check_count(len(theirs.inputs), "inputs", MAX_TENSORS)
    raw = theirs.raw_input_contents
    if raw and len(raw) != len(theirs.inputs):
        raise InvalidArgument("raw_input_contents", f"has {len(raw)} entries for {len(theirs.inputs)} inputs")
    tensors = _Tensors({}, {})
    for index, tensor in enumerate(theirs.inputs):
        name = tensor.name
        if (kind := INPUTS.get(name)) is None:
            raise Unimplemented(f"inputs.{named(name)}")
        if tensor.datatype != kind:
            raise InvalidArgument(name, f"has the datatype {named(tensor.datatype)}, must have {kind}")
        if tensor.parameters:
            raise Unimplemented(f"inputs.{name}.parameters")
        if not 1 <= len(tensor.shape) <= MAX_DIMENSIONS or any(size != 1 for size in tensor.shape):
            raise InvalidArgument(name, "must have the shape [1]")
        if name in tensors.texts or name in tensors.flags:
            raise InvalidArgument(name, "is given twice")
        if raw and tensor.HasField("contents"):
            raise InvalidArgument(name, "has contents besides raw_input_contents")
        if kind == "BYTES":
            tensors.texts[name] = _text_in(name, raw[index] if raw else None, tensor.contents)
        else:
            tensors.flags[name] = _flag_in(name, raw[index] if raw else None, tensor.contents)
    return tensors


def _text_in(name: str, raw: bytes | None, contents: kserve.InferTensorContents) -> str:
    if raw is not None:
        if len(raw) < 4 or int.from_bytes(raw[:4], "little") != len(raw) - 4:
            raise InvalidArgument(name, "must hold one value: its length in four bytes, and it")
        value = raw[4:]
    elif len(contents.bytes_contents) == 1:
        value = contents.bytes_contents[0]
    else:
        raise InvalidArgument(name, f"has {len(contents.bytes_contents)} values, must have 1")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, "is not UTF-8") from None


def _flag_in(name: str, raw: bytes | None, contents: kserve.InferTensorContents) -> bool:
    if raw is not None:
        if raw not in (b"\0", b"\1"):
            raise InvalidArgument(name, "must hold one byte, 0 or 1")
        return raw == b"\1"
    if len(contents.bool_contents) != 1:
        raise InvalidArgument(name, f"has {len(contents.bool_contents)} values, must have 1")
    return contents.bool_contents[0]


def _json_object(text: str, field: str, limits: Limits) -> dict[str, Json]:
    check_size(len(text.encode()), field, limits.max_json_bytes)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidArgument(field, "is nested too deep") from None
    except ValueError:
        raise InvalidArgument(field, "is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidArgument(field, "is JSON but not an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A sampling parameter by vLLM's name. Strings may stand for numbers and booleans, as in Triton's examples."""

    field: str
    value: Json
    limits: Limits

    def put(self, key: str, ours: inference_pb2.GenerateRequest) -> None:
        """Set it in our request. Raises InvalidArgument, Unimplemented."""
        sampling, stopping = ours.sampling, ours.stopping
        match key:
            case _ if key in _FLOATS:
                setattr(sampling, key, self._number(_FLOATS[key]))
            case "top_k":
                sampling.top_k = max(0, self._integer(-1, _UINT32))  # vLLM's -1 keeps all, as our 0 does
            case "n":
                sampling.n = self._integer(0, _UINT32)
            case "seed":
                sampling.seed = self._integer(-(1 << 63), _UINT64) % (1 << 64)
            case "logit_bias":
                sampling.logit_bias.update(self._biases())
            case "allowed_token_ids":
                sampling.allowed_token_ids.extend(self._ids(self.limits.vocab_size))
            case "bad_words":
                sampling.bad_words.extend(self._texts(self.limits.max_bad_words))
            case "max_tokens":
                stopping.max_tokens = self._integer(0, _UINT32)
            case "min_tokens":
                stopping.min_tokens = self._integer(0, _UINT32)
            case "stop":
                stopping.stop.extend(self._texts(self.limits.max_stop))
            case "stop_token_ids":
                stopping.stop_token_ids.extend(self._ids(self.limits.max_stop_ids))
            case "ignore_eos":
                stopping.ignore_eos = self._flag()
            case "include_stop_str_in_output":
                stopping.include_stop_in_output = self._flag()
            case "skip_special_tokens":
                ours.output.special_tokens = not self._flag()
            case "structured_outputs":
                ours.guided.CopyFrom(self._format())
            case _:
                raise Unimplemented(self.field)

    def _number(self, interval: Interval) -> float:
        number: Json = self.value
        try:
            if isinstance(number, str):
                number = float(number)
        except ValueError:
            number = None
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise InvalidArgument(self.field, "is not a number")
        check_number(number, self.field, interval)
        return number

    def _integer(self, low: int, high: int) -> int:
        number: Json = self.value
        try:
            if isinstance(number, str):
                number = int(number)
        except ValueError:
            number = None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if not isinstance(number, int) or isinstance(number, bool):
            raise InvalidArgument(self.field, "is not a whole number")
        check_integer(number, self.field, low, high)
        return number

    def _flag(self) -> bool:
        if isinstance(self.value, bool):
            return self.value
        if isinstance(self.value, str) and self.value.lower() in ("true", "false"):
            return self.value.lower() == "true"
        raise InvalidArgument(self.field, "is neither true nor false")

    def _list(self, most: int) -> list[_Parameter]:
        if not isinstance(self.value, list):
            raise InvalidArgument(self.field, "is not a list")
        check_count(len(self.value), self.field, most)
        return [_Parameter(f"{self.field}[{index}]", value, self.limits) for index, value in enumerate(self.value)]

    def _ids(self, most: int) -> list[int]:
        return [each._integer(0, _UINT32) for each in self._list(most)]

    def _texts(self, most: int) -> list[str]:
        if isinstance(self.value, str):
            return [self._text()]
        return [each._text() for each in self._list(most)]

    def _text(self) -> str:
        if not isinstance(self.value, str):
            raise InvalidArgument(self.field, "is not a text")
        if any("\ud800" <= each <= "\udfff" for each in self.value):
            raise InvalidArgument(self.field, "holds half a character")
        return self.value

    def _format(self) -> inference_pb2.Guided:
        """vLLM's formats as a JSON object, or as its text, which is what clients of Triton's backend send."""
        given = self.value
        if isinstance(given, str):
            given = _json_object(given, self.field, self.limits)
        try:
            return structured_outputs(given, self.field)
        except UnicodeEncodeError:
            raise InvalidArgument(self.field, "holds half a character") from None

    def _biases(self) -> dict[int, float]:
        if not isinstance(self.value, dict):
            raise InvalidArgument(self.field, "is not an object")
        check_count(len(self.value), self.field, self.limits.max_logit_bias)
        return {
            _Parameter(self.field, id, self.limits)._integer(0, _UINT32): _Parameter(
                f"{self.field}.{named(id)}", bias, self.limits
            )._number(LOGIT_BIAS)
            for id, bias in self.value.items()
        }


# -- the answer --------------------------------------------------------------------------------------------------------


def add_output(response: kserve.ModelInferResponse, name: str, values: Sequence[str] | Sequence[int]) -> None:
    """Add a tensor of these values."""
    response.outputs.add(name=name, datatype=OUTPUTS[name], shape=[len(values)])
    parts: list[bytes] = []
    for value in values:
        if isinstance(value, str):
            content = value.encode()
            parts += (struct.pack("<I", len(content)), content)
        else:
            parts.append(struct.pack("<I", value))
    response.raw_output_contents.append(b"".join(parts))


# -- requests ----------------------------------------------------------------------------------------------------------
