"""docker-compose.yml and the Dockerfile, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pagoda_server.runtime.channel_trust import ChannelTrust
from pagoda_server.settings import EngineConfig

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def options_of(*command: str) -> set[str]:
    result = subprocess.run(
        [sys.executable, "-m", *command, "--help"],
        cwd=ROOT, capture_output=True, text=True, check=True, env={"COLUMNS": "200", "TERM": "dumb", "PATH": ""},
    )  # fmt: skip
    return set(re.findall(r"--[a-z][a-z-]*", result.stdout))


def flags_of(service: str) -> set[str]:
    return {argument.partition("=")[0] for argument in SERVICES[service]["command"] if argument.startswith("--")}


def stage(target: str) -> str:
    found = re.search(rf"^FROM \S+ AS {target}$(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found, f"the Dockerfile has no stage {target}"
    return found[1]


def test_the_file_is_valid_by_the_compose_specification() -> None:
    schema = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []


@pytest.mark.parametrize(
    ("service", "command"),
    [
        ("router", ("pagoda_server.cli", "serve")),
        ("engine", ("pagoda_server.engine",)),
        ("engine-gpu", ("pagoda_server.engine",)),
    ],
)
def test_every_flag_exists(service: str, command: tuple[str, ...]) -> None:
    flags = flags_of(service)
    assert "--model" in flags
    assert flags <= options_of(*command)


def test_entrypoints_and_health_checks_are_real_commands() -> None:
    assert 'ENTRYPOINT ["pagoda", "serve"]' in DOCKERFILE
    assert 'ENTRYPOINT ["python", "-m", "pagoda_server.engine"]' in DOCKERFILE
    assert SERVICES["model"]["entrypoint"] == ["python", "-m", "pagoda_server.checkpoints"]
    for service in ("router", "engine", "engine-gpu"):
        _, program, command, flag, _ = SERVICES[service]["healthcheck"]["test"]
        assert (program, command) == ("pagoda", "health")
        assert flag in options_of("pagoda_server.cli", "health")


def test_every_path_that_the_images_copy_exists() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)


def test_torch_for_cpus_is_the_default_even_where_the_index_is_given_as_empty() -> None:
    assert SERVICES["engine"]["build"]["args"] == {"TORCH_INDEX": "${TORCH_INDEX:-}"}
    assert re.search(r'--index-url "\$\{TORCH_INDEX:-https://\S+/cpu\}"', stage("engine"))
    assert "engine-gpu" not in {SERVICES[name]["build"]["target"] for name in ("engine", "engine-2")}
    assert re.search(r"^FROM base AS engine-gpu$", DOCKERFILE, re.MULTILINE), "not from the image with torch for CPUs"


def test_bases_are_pinned_and_every_image_lists_what_it_holds() -> None:
    assert re.search(r"^ARG BASE=python:3\.\d+\.\d+-slim-[a-z]+$", DOCKERFILE, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.MULTILINE)) == {"${BASE}", "base", "engine"}
    for target in ("router", "engine", "engine-gpu", "ray"):
        assert f"/sbom.py pagoda-{target}\n" in stage(target)
        assert "g++" not in stage(target)


def test_an_image_lists_every_distribution_with_its_version(tmp_path: Path) -> None:
    listed = tmp_path / "sbom.cdx.json"
    subprocess.run([sys.executable, ROOT / "deploy" / "sbom.py", "pagoda-router", listed], check=True)
    document = json.loads(listed.read_text())
    assert document["metadata"]["component"]["name"] == "pagoda-router"
    purls = [component["purl"] for component in document["components"]]
    assert len(set(purls)) == len(purls)
    for name in ("pagoda-server", "grpcio", "typing-extensions"):
        assert f"pkg:pypi/{name}@{metadata.version(name)}" in purls
    if shutil.which("dpkg-query"):
        assert any(purl.startswith("pkg:deb/") and "/libc6@" in purl for purl in purls)


def test_every_folder_of_the_server_is_in_the_images() -> None:
    for link in (ROOT / "src" / "pagoda_server").iterdir():
        if link.is_symlink():
            folder = link.resolve().relative_to(ROOT).parts[0]
            assert f"COPY {folder} {folder}" in DOCKERFILE


def test_every_file_that_the_build_reads_is_in_the_images() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = " ".join(re.findall(r"^COPY (.+) \./$", DOCKERFILE, re.MULTILINE)).split()
    read = {"pyproject.toml", "setup.py", project["readme"], *project["license-files"]}
    assert set(copied) == {*read, "deploy/locks/base.txt"}


@pytest.mark.parametrize("service", ["model", "token", "router", "engine", "engine-gpu"])
def test_targets_exist_and_no_service_runs_as_root(service: str) -> None:
    users = re.findall(r"^USER (.+)$", stage(SERVICES[service]["build"]["target"]), re.MULTILINE)
    assert users[-1] == "pagoda"


def test_router_and_engine_share_only_the_channel_and_the_model() -> None:
    assert COMPOSE["networks"]["channel"] == {"internal": True}
    assert set(SERVICES["engine"]["networks"]) == {"channel"}
    assert set(SERVICES["engine-gpu"]["networks"]) == {"channel"}
    assert not any("ports" in SERVICES[engine] for engine in ("engine", "engine-gpu"))
    own = {"triton:/triton"}
    ours = [name for name in SERVICES if "build" in SERVICES[name]]
    shared = {"model": {"models:/models"}, "token": {"channel:/channel"}}
    both = {"models:/models", "channel:/channel:ro"}
    assert all({*SERVICES[name]["volumes"]} - own == shared.get(name, both) for name in ours)
    assert [name for name in ours if own & {*SERVICES[name]["volumes"]}] == ["engine-gpu"]
    assert all(port.startswith("127.0.0.1:") for service in SERVICES.values() for port in service.get("ports", ()))


def test_the_token_of_the_channel_is_drawn_once_and_is_one_that_engines_take(tmp_path: Path) -> None:
    assert re.search(r"install -d -o pagoda -g pagoda .*/channel\b", stage("base")), "a new volume is the user's"
    (line,) = SERVICES["token"]["command"]
    drawn = []
    for _ in range(2):
        subprocess.run([*SERVICES["token"]["entrypoint"], line.replace("/channel/", f"{tmp_path}/")], check=True)
        drawn.append((tmp_path / "token").read_bytes())
    assert drawn[0] == drawn[1]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    trust = ChannelTrust(EngineConfig(channel_token_file=str(tmp_path / "token")), is_engine=True)
    trust.load()
    assert len(trust.current.tokens) == 1
    for service in ("router", "engine", "engine-gpu"):
        assert "--channel-token-file=/channel/token" in SERVICES[service]["command"]
        assert SERVICES[service]["depends_on"]["token"] == {"condition": "service_completed_successfully"}


def test_grpc_and_http_are_published_where_the_router_listens() -> None:
    flags = dict(
        argument.removeprefix("--").split("=", 1) for argument in SERVICES["router"]["command"] if "=" in argument
    )
    inside = [port.rpartition(":")[2] for port in SERVICES["router"]["ports"]]
    assert [flags["listen"], flags["http"]] == [f"0.0.0.0:{port}" for port in inside]
    assert re.findall(r"^EXPOSE (.+)$", stage("router"), re.MULTILINE) == [" ".join(inside)]
    assert flags["http-allowed-hosts"] == "router,router-2"


def test_a_model_of_the_hub_is_fetched_by_one_and_found_by_all() -> None:
    environment = dict(setting.split("=") for setting in re.findall(r"[A-Z_]+=\S+", stage("base")))
    assert environment["HF_HOME"].startswith("/models/")
    assert "HF_HUB_OFFLINE" not in SERVICES["model"].get("environment", {})
    for service in ("router", "engine", "engine-gpu"):
        assert SERVICES[service]["environment"]["HF_HUB_OFFLINE"] == "1"


def test_on_a_gpu_triton_has_a_compiler_and_a_cache_that_it_may_write_and_load_from() -> None:
    image = stage("engine-gpu")
    assert re.search(r"apt-get install .* gcc libc6-dev", image)
    cache = re.search(r"^ENV TRITON_CACHE_DIR=(.+)$", image, re.MULTILINE)
    assert cache
    assert f"install -d -o pagoda -g pagoda {cache[1]}" in image
    assert f"triton:{cache[1]}" in SERVICES["engine-gpu"]["volumes"]
    assert "gcc" not in stage("engine")


def test_the_profile_fleet_adds_an_engine_and_a_router_like_the_first() -> None:
    assert {name for name, service in SERVICES.items() if "fleet" in service.get("profiles", ())} == {
        "engine-2", "router-2",
    }  # fmt: skip
    own = {
        "engine-2": {"profiles": ["fleet"], "networks": {"channel": {"aliases": ["engine"]}}},
        "router-2": {"profiles": ["fleet"], "ports": ["127.0.0.1:50061:50051", "127.0.0.1:8001:8000"]},
    }
    assert SERVICES["engine-2"] == SERVICES["engine"] | own["engine-2"]
    assert SERVICES["router-2"] == SERVICES["router"] | own["router-2"]


def test_one_profile_runs_one_engine_under_the_name_that_the_router_calls() -> None:
    assert "--engine=dns:engine:50052" in SERVICES["router"]["command"]
    assert (ROOT / ".env").read_text().strip() == "COMPOSE_PROFILES=cpu"
    assert SERVICES["engine"]["profiles"] == ["cpu"]
    assert SERVICES["engine-gpu"]["profiles"] == ["gpu"]
    assert SERVICES["engine-gpu"]["networks"]["channel"]["aliases"] == ["engine"]
    (device,) = SERVICES["engine-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["count"], device["capabilities"]) == (1, ["gpu"])


def test_the_profile_metrics_adds_programs_of_pinned_versions_that_look_on_and_no_more() -> None:
    added = {name for name, service in SERVICES.items() if "metrics" in service.get("profiles", ())}
    assert added == {"prometheus", "grafana"}
    for name in added:
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])
        assert "networks" not in SERVICES[name], "the channel is not theirs"
        assert SERVICES[name]["read_only"]
        volumes = [volume.split(":") for volume in SERVICES[name]["volumes"]]
        assert all(options == ["ro"] for source, _, *options in volumes if source.startswith("."))
        assert all((ROOT / source).exists() for source, *_ in volumes if source.startswith("."))
        assert {source for source, *_ in volumes if not source.startswith(".")} == {name} <= set(COMPOSE["volumes"])


def test_prometheus_scrapes_the_router_by_a_name_that_it_accepts_and_grafana_asks_prometheus() -> None:
    deploy = ROOT / "deploy"
    (scraped,) = yaml.safe_load((deploy / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["static_configs"] == [{"targets": ["router:8000"]}]
    assert {"--http=0.0.0.0:8000", "--http-allowed-hosts=router,router-2"} <= set(SERVICES["router"]["command"])
    (source,) = yaml.safe_load((deploy / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert SERVICES["prometheus"]["ports"] == ["127.0.0.1:9090:9090"]
    (provider,) = yaml.safe_load((deploy / "grafana/provisioning/dashboards/pagoda.yml").read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/pagoda.json"
    assert f"./deploy/grafana/pagoda.json:{home}:ro" in SERVICES["grafana"]["volumes"]
