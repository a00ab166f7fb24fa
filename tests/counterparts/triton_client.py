"""Talks to a server with tritonclient, whose environment has nothing of ours; prints what it saw as JSON.

python triton_client.py HOST:PORT
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

MODEL = "synthetic"
GREEDY = {"temperature": "0", "max_tokens": 20, "ignore_eos": True}


def text(name: str, value: str) -> Any:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
    return tensor


def flag(name: str, value: bool) -> Any:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value], dtype=bool))
    return tensor


def asking(prompt: str, **parameters: Any) -> list[Any]:
    sampling = text("sampling_parameters", json.dumps(GREEDY | parameters))
    return [text("text_input", prompt), sampling, flag("exclude_input_in_output", True)]


def texts(result: Any, name: str = "text_output") -> list[str]:
    return [value.decode() for value in result.as_numpy(name)]


def error_of(call: Any) -> list[str]:
    try:
        call()
    except InferenceServerException as error:
        return [error.status(), error.message()]
    raise AssertionError("it did not fail")


def unary(client: triton.InferenceServerClient) -> dict[str, Any]:
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "finish_reason", "num_output_tokens")]
    result = client.infer(MODEL, asking("steady", n=2), request_id="42", outputs=outputs)
    return {
        "id": result.get_response().id,
        "texts": texts(result),
        "reasons": texts(result, "finish_reason"),
        "counts": result.as_numpy("num_output_tokens").tolist(),
        "choice": texts(
            client.infer(MODEL, asking("steady", structured_outputs=json.dumps({"choice": ["yes", "no"]})))
        ),
        "bad value": error_of(lambda: client.infer(MODEL, asking("steady", temperature=1000))),
        "bad model": error_of(lambda: client.infer("other", asking("steady"))),
        "deadline": error_of(lambda: client.infer(MODEL, asking("steady", max_tokens=9000), client_timeout=0.5)),
    }


def cancelled(client: triton.InferenceServerClient) -> list[str]:
    ended: queue.Queue[Any] = queue.Queue()
    call = client.async_infer(MODEL, asking("steady", max_tokens=9000), callback=lambda result, error: ended.put(error))
    call.cancel()
    error = ended.get(timeout=120)
    return [error.status(), error.message()]


def streamed(client: triton.InferenceServerClient) -> dict[str, Any]:
    seen: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: seen.put((result, error)))
    client.async_stream_infer(MODEL, [*asking("first", max_tokens=100), flag("stream", True)], request_id="a")
    client.async_stream_infer(MODEL, asking("second"), request_id="b", enable_empty_final_response=True)
    client.async_stream_infer(MODEL, [*asking("third"), flag("stream", True)], request_id="c")
    client.async_stream_infer(MODEL, asking("fourth", temperature=1000), request_id="d")
    client.stop_stream()  # waits for all answers
    found: dict[str, Any] = {"pieces": {}, "finals": [], "errors": []}
    while not seen.empty():
        result, error = seen.get()
        if error is not None:
            found["errors"].append(error.message())
            continue
        response = result.get_response()
        found["pieces"].setdefault(response.id, []).extend(texts(result))
        if response.parameters["triton_final_response"].bool_param:
            found["finals"].append(response.id)
    return found


def stream_cancelled(client: triton.InferenceServerClient) -> list[str]:
    seen: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: seen.put((result, error)))
    for at in range(3):
        client.async_stream_infer(MODEL, [*asking(f"{at}", max_tokens=9000), flag("stream", True)])
    seen.get(timeout=120)
    client.stop_stream(cancel_requests=True)
    while True:
        _, error = seen.get(timeout=120)
        if error is not None:
            return [error.status(), error.message()]


def main(url: str) -> None:
    with triton.InferenceServerClient(url) as client:
        print(
            json.dumps(
                {
                    "live": client.is_server_live(),
                    "ready": [client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("other")],
                    "server": client.get_server_metadata(as_json=True)["name"],
                    "model": client.get_model_metadata(MODEL, as_json=True),
                    "unary": unary(client),
                    "cancelled": cancelled(client),
                    "streamed": streamed(client),
                    "stream cancelled": stream_cancelled(client),
                }
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
