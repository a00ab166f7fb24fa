"""The examples for KubeRay and llm-d: Kubernetes accepts their objects, which fit each other and our settings."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from pagoda_server.router.telemetry.families import FAMILIES
from pagoda_server.runtime.channel_trust import ENGINE_NAME
from pagoda_server.settings import ServeConfig
from pagoda_server.settings.command_line import command
from pagoda_server.settings.fleet import FleetConfig
from tests.counterparts.test_helm import CUSTOM, VALIDATE, VERSIONS, Object, objections, python
from tests.servers import ROOT

pytestmark = [pytest.mark.counterpart, pytest.mark.timeout(300)]

EXAMPLES = {"kuberay": ROOT / "deploy" / "kuberay" / "fleet.yaml", "llm-d": ROOT / "deploy" / "llm-d" / "pool.yaml"}
OTHERS = {"RayCluster", "InferencePool"}  # kinds of which no package has a schema
each_example = pytest.mark.parametrize("example", EXAMPLES)


@cache
def objects(example: str) -> list[Object]:
    return list(yaml.safe_load_all(EXAMPLES[example].read_text()))


def of_kind(example: str, kind: str, name: str = "") -> Object:
    (found,) = (each for each in objects(example) if each["kind"] == kind and name in ("", each["metadata"]["name"]))
    return found


def templates(example: str) -> list[Object]:
    """All templates of pods."""
    found = [each["spec"]["template"] for each in objects(example) if each["kind"] == "Deployment"]
    for each in objects(example):
        if each["kind"] == "RayCluster":
            found.append(each["spec"]["headGroupSpec"]["template"])
            found += [group["template"] for group in each["spec"]["workerGroupSpecs"]]
    return found


def container_of(example: str, name: str) -> Object:
    (found,) = of_kind(example, "Deployment", name)["spec"]["template"]["spec"]["containers"]
    return dict(found)


def parsed(config: Any, arguments: list[str]) -> Any:
    """The settings of a command line, as the process that gets it reads them."""
    read: list[Any] = []

    def keep(given: Any) -> int:
        read.append(given)
        return 0

    app = typer.Typer()
    app.command()(command(config, keep))
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    return read[0]


@each_example
def test_kubernetes_schemas_accept_every_object_and_know_all_of_its_fields(example: str, tmp_path: Any) -> None:
    ours = [each for each in objects(example) if each["kind"] not in {*CUSTOM, *OTHERS}]
    ours += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"} | each["metadata"], "spec": each["spec"]}
        for each in templates(example)
    ]
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(ours))
    done = subprocess.run(
        [python(), "-c", VALIDATE, *VERSIONS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_schema_of_the_gateway_api_accepts_the_route_and_knows_all_of_its_fields() -> None:
    assert objections([of_kind("llm-d", "GRPCRoute")]) == ""


@each_example
def test_pods_have_few_rights_limits_and_a_pinned_image(example: str) -> None:
    user = int(re.findall(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())[0])
    targets = set(re.findall(r" AS ([\w-]+)", (ROOT / "Dockerfile").read_text()))
    for template in templates(example):
        pod = template["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, user)
        volumes = {each["name"] for each in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
            assert (image := re.fullmatch(r"pagoda-([\w-]+):\d[\w.]*", container["image"]))
            assert image[1] in targets
            assert {each["name"] for each in container.get("volumeMounts", ())} <= volumes
            ports = {each["name"] for each in container.get("ports", ())}
            for kind in ("startup", "readiness", "liveness"):
                assert container.get(f"{kind}Probe", {}).get("httpGet", {}).get("port") in {None, *ports}


@each_example
def test_services_and_policies_select_pods_and_name_their_ports(example: str) -> None:
    pods = [each for each in objects(example) if each["kind"] == "Deployment"]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in pods]
    for each, own in zip(pods, labels, strict=True):
        assert each["spec"]["selector"]["matchLabels"].items() <= own.items()
    for each in objects(example):
        if each["kind"] in ("Service", "NetworkPolicy", "InferencePool"):
            spec = each["spec"]
            selector = spec.get("podSelector", spec.get("selector"))
            wanted = selector.get("matchLabels", selector)
            (chosen,) = [pod for pod, own in zip(pods, labels, strict=True) if wanted.items() <= own.items()]
            ports = chosen["spec"]["template"]["spec"]["containers"][0]["ports"]
            known = {port["name"] for port in ports} | {port["containerPort"] for port in ports}
            asked = [port["targetPort"] for port in spec.get("ports", ())]
            asked += [port["number"] for port in spec.get("targetPorts", ())]
            asked += [port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]]
            assert asked
            assert set(asked) <= known


def test_the_driver_joins_the_cluster_with_its_token_and_asks_for_what_a_node_has() -> None:
    cluster, driver = of_kind("kuberay", "RayCluster"), container_of("kuberay", "pagoda-driver")
    joins, _, starts = driver["args"][0].partition(" && exec pagoda fleet ")
    assert f"--address={cluster['metadata']['name']}-head-svc:6379" in joins
    assert "--num-cpus=0" in joins
    environment = {each["name"]: each for each in driver["env"]}
    auth = cluster["spec"]["authOptions"]
    assert environment["RAY_AUTH_MODE"]["value"] == auth["mode"] == "token"
    reference = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert reference == {"name": auth["secretName"], "key": "auth_token"}
    assert of_kind("kuberay", "Deployment", "pagoda-driver")["spec"]["strategy"] == {"type": "Recreate"}
    config = parsed(FleetConfig, starts.split())
    assert config.ray == "auto"
    assert config.metrics.endswith(f":{driver['ports'][0]['containerPort']}")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    (node,) = group["template"]["spec"]["containers"]
    assert config.engine_cpus <= float(node["resources"]["limits"]["cpu"])
    assert config.bounds.most <= group["maxReplicas"]
    for each in (cluster["spec"]["headGroupSpec"], group):
        (container,) = each["template"]["spec"]["containers"]
        patience = {one["name"]: one.get("value") for one in container["env"]}
        assert patience["RAY_gcs_rpc_server_reconnect_timeout_s"] == "86400"
    lowest, highest = re.findall(r'"ray>=([\d.]+),<(\d+)', (ROOT / "pyproject.toml").read_text())[0]
    version = [int(part) for part in cluster["spec"]["rayVersion"].split(".")]
    assert [int(part) for part in lowest.split(".")] <= version < [int(highest)]


def test_routers_read_what_the_driver_writes() -> None:
    router = parsed(ServeConfig, container_of("kuberay", "pagoda-router")["args"])
    driver = parsed(
        FleetConfig, container_of("kuberay", "pagoda-driver")["args"][0].partition("pagoda fleet ")[2].split()
    )
    assert router.engine == f"file:{driver.folder}/engines.json"
    for path in (router.channel_tls_cert, router.channel_tls_key, router.channel_tls_ca, router.channel_token_file):
        assert path.startswith(f"{driver.folder}/")
    assert router.channel_tls_name == ENGINE_NAME
    assert router.model == driver.model
    for name in ("pagoda-driver", "pagoda-router"):
        template = of_kind("kuberay", "Deployment", name)["spec"]["template"]["spec"]
        (volume,) = [each for each in template["volumes"] if each["name"] == "fleet"]
        assert (
            volume["persistentVolumeClaim"]["claimName"]
            == of_kind("kuberay", "PersistentVolumeClaim")["metadata"]["name"]
        )
        (mount,) = [each for each in template["containers"][0]["volumeMounts"] if each["name"] == "fleet"]
        assert driver.folder.startswith(f"{mount['mountPath']}/")
    grace_s = of_kind("kuberay", "Deployment", "pagoda-router")["spec"]["template"]["spec"][
        "terminationGracePeriodSeconds"
    ]
    assert grace_s > router.grace_s + 10 + 4


def test_the_picker_parses_what_the_pool_speaks_and_chooses_by_metrics_that_exist() -> None:
    pool, route = of_kind("llm-d", "InferencePool"), of_kind("llm-d", "GRPCRoute")
    server = container_of("llm-d", "pagoda")
    config = parsed(ServeConfig, server["args"])
    assert pool["spec"]["appProtocol"] == "kubernetes.io/h2c"
    assert config.tls_cert is None
    assert config.allow_insecure
    assert config.spawns_engine
    (target,) = pool["spec"]["targetPorts"]
    assert config.listen.endswith(f":{target['number']}")
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"method": {"service": "vllm.grpc.engine.VllmEngine"}}]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    picker = yaml.safe_load(of_kind("llm-d", "ConfigMap")["data"]["config.yaml"])
    plugins = {each["type"]: each.get("parameters", {}) for each in picker["plugins"]}
    used = [each["pluginRef"] for profile in picker["schedulingProfiles"] for each in profile["plugins"]]
    used += [each["pluginRef"] for each in picker["requestHandler"]["parsers"]]
    assert set(used) <= plugins.keys()
    assert "vllmgrpc-parser" in used
    assert config.http.endswith(f":{plugins['metrics-data-source']['port']}")
    ours = {name for family in FAMILIES for name in family.full_names}
    scraped = {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"}
    assert scraped | {"vllm:cache_config_info"} <= ours
    grace_s = of_kind("llm-d", "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s >= config.grace_s + 10 + 5
