"""Settings that `pagoda serve` refuses, and those that it passes to an engine that it spawns."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pagoda_server.settings import ServeConfig, SettingError
from pagoda_server.settings.router import named_models


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"hang_timeout_s": 0.0}, "--hang-timeout-s must be at least 0.1 and finite, not 0.0"),
        ({"hang_timeout_s": math.nan}, "--hang-timeout-s must be at least 0.1 and finite, not nan"),
        ({"stall_timeout_s": 0.0}, "--stall-timeout-s must be at least 0.1 and finite, not 0.0"),
        ({"stall_timeout_s": math.inf}, "--stall-timeout-s must be at least 0.1 and finite, not inf"),
        ({"grace_s": -1.0}, "--grace-s must be at least 0 and finite, not -1.0"),
        ({"grace_s": math.nan}, "--grace-s must be at least 0 and finite, not nan"),
        ({"max_requests": 0}, "--max-requests must be from 1 to 4294967295, not 0"),
        ({"max_requests": 1 << 32}, "--max-requests must be from 1 to 4294967295, not 4294967296"),
        ({"max_queued_tokens": 0}, "--max-queued-tokens must be from 1 to "),
        ({"max_queued_tokens": -1}, "--max-queued-tokens must be from 1 to "),
        ({"default_max_tokens": 0}, "--default-max-tokens must be from 1 to 4294967295, not 0"),
        ({"max_text_bytes": 0}, "--max-text-bytes must be from 1 to "),
        ({"max_num_seqs": 600, "device": "cpu"}, r"--token-budget \(512\) must exceed --max-num-seqs"),
        ({"workers": 10**30}, "--workers must be at most [0-9]+, 4 for each core of this machine, not 10{30}$"),
        ({"workers": 0}, "--workers must be at least 1, not 0"),
        ({"listen": "127.0.0.1:99999"}, "--listen '127.0.0.1:99999': a port is from 0 to 65535"),
        ({"listen": "shm:@x"}, "--listen 'shm:@x' is not unix:PATH or HOST:PORT"),
        ({"engine": "nonsense"}, "--engine 'nonsense' is not shm:PATH, unix:PATH or HOST:PORT"),
        ({"engine": "unix:/e,127.0.0.1:0"}, "--engine '127.0.0.1:0': a port is from 1 to 65535"),
        ({"engine": "unix:/e,"}, "--engine '' is not"),
        ({"otlp_endpoint": "127.0.0.1:4318"}, "--otlp-endpoint must be http://HOST:PORT or https://HOST:PORT, not 127"),
        ({"otlp_endpoint": "http://"}, "--otlp-endpoint must be http://HOST:PORT"),
        ({"otlp_endpoint": "http://a:b"}, "--otlp-endpoint "),
        ({"otlp_endpoint": "grpc://127.0.0.1:4317"}, "--otlp-endpoint must be http://HOST:PORT"),
        ({"otlp_endpoint": "http://[::1"}, "--otlp-endpoint "),
        ({"http": "unix:/s"}, "--http must be HOST:PORT, not unix:/s"),
        ({"http": "127.0.0.1"}, "--http '127.0.0.1' is not unix:PATH or HOST:PORT"),
        ({"http_allowed_hosts": "a.org,b.org:80"}, "--http-allowed-hosts must be names .* not 'b.org:80'"),
        ({"http_allowed_hosts": ""}, "--http-allowed-hosts must be names .* not ''"),
        ({"http_allowed_origins": "a.org"}, "--http-allowed-origins must be origins .* not 'a.org'"),
        ({"http_allowed_origins": "https://a.org/"}, "--http-allowed-origins must be origins .* not 'https://a.org/'"),
        ({"also_serve": ""}, "--also-serve must be MODEL or NAME=MODEL, separated by commas, not ''"),
        ({"also_serve": "a=/m,=/n"}, "--also-serve must be MODEL or NAME=MODEL"),
        ({"also_serve": "a=,b"}, "--also-serve must be MODEL or NAME=MODEL"),
        ({"lora": "a"}, "--lora must be NAME=PATH, separated by commas, not 'a'"),
        ({"lora": f"{'a' * 129}=/x"}, "--lora must be NAME=PATH"),
        ({"lora": "a=/\udcff"}, "--lora must be NAME=PATH"),
        ({"lora": f"a=/{'x' * 4096}"}, "--lora has a path of more than 4096 characters"),
        ({"lora": "a=/x,a=/y"}, "--lora has a name twice"),
        ({"served_model_name": ""}, "--served-model-name must be printable and not empty, not ''"),
        ({"served_model_name": "a\n"}, "--served-model-name must be printable"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_flag_and_the_limit(setting: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        ServeConfig(**setting)


def test_an_engines_settings_are_refused_where_it_runs_elsewhere() -> None:
    ServeConfig(engine="unix:/e", hang_timeout_s=5.0, log_level="debug").check_engine_is_ours()
    ServeConfig(policy="fair", channel="grpc").check_engine_is_ours()
    given = ServeConfig(engine="unix:/e", policy="fair", kv_cache_gb=1.0, prefix_caching=False, channel="grpc")
    with pytest.raises(SettingError, match=r"^--channel, --kv-cache-gb, --prefix-caching, --policy: .*unix:/e"):
        given.check_engine_is_ours()


def test_more_models_need_engines_that_run_elsewhere() -> None:
    ServeConfig(engine="unix:/e", also_serve="b").check_engine_is_ours()
    with pytest.raises(SettingError, match=r"^--also-serve needs --engine"):
        ServeConfig(also_serve="b").check_engine_is_ours()
    assert named_models("a=/m=1, /n,org/name") == [("a", "/m=1"), ("", "/n"), ("", "org/name")]


def test_an_engine_that_is_spawned_is_told_what_is_set() -> None:
    config = ServeConfig(kv_cache_gb=1.5, prefix_caching=False, policy="fair", tenant_weights="a=2", log_level="error")
    arguments = config.engine_arguments(Path("/folder"), "unix:/e")
    assert {"--model=/folder", "--listen=unix:/e", "--log-level=error"} <= set(arguments)
    assert {"--kv-cache-gb=1.5", "--no-prefix-caching", "--tenant-weights=a=2", "--device=auto"} <= set(arguments)
    assert not any(argument.startswith(("--threads", "--max-model-len")) for argument in arguments)
