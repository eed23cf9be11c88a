"""The manifests of docs/how-to/kubernetes: fields and types against two sets of schemas, and torchrun's command.

1. Kubernetes' own schemas, of the package kubernetes-validate, which needs 100 MB (``make test-recipes``). It has no
   schema of MPIJob, but one of its pods.
2. The schemas below. They are ours, written from the references of core v1, batch/v1, and kubeflow.org/v2beta1 of the
   MPI operator 0.6, as far as the manifests use them. They also limit names, quantities and enumerations. An object may
   have the keys of its dictionary and no others; those with "!" it must have.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import jobs
import pytest
import yaml

from hvdbridge.startup.network import free_port

FOLDER = Path(__file__).parents[2] / "docs/how-to/kubernetes"
SCRIPT = Path(__file__).parent / "scripts" / "places.py"

NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
LABEL = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
ANY_KEY = "*"
META = {"name!": NAME, "namespace": NAME, "labels": {ANY_KEY: LABEL}, "annotations": {ANY_KEY: str}}
PROBE = {
    "tcpSocket": {"port!": int, "host": str}, "initialDelaySeconds": int, "periodSeconds": int, "timeoutSeconds": int,
    "failureThreshold": int,
}  # fmt: skip
CONTAINER = {
    "name!": NAME, "image": str, "imagePullPolicy": {"Always", "IfNotPresent", "Never"}, "workingDir": str,
    "command": [str], "args": [str], "env": [{"name!": str, "value": str, "valueFrom": dict}],
    "resources": {"limits": {ANY_KEY: QUANTITY}, "requests": {ANY_KEY: QUANTITY}}, "readinessProbe": PROBE,
    "volumeMounts": [{"name!": NAME, "mountPath!": str, "readOnly": bool, "subPath": str}],
}  # fmt: skip
POD = {
    "containers!": [CONTAINER], "subdomain": NAME, "hostname": NAME, "terminationGracePeriodSeconds": int,
    "volumes": [{"name!": NAME, "emptyDir": {"medium": {"", "Memory", "HugePages"}, "sizeLimit": QUANTITY}}],
}  # fmt: skip
TEMPLATE = {"metadata": {"labels": {ANY_KEY: LABEL}}, "spec!": POD | {"restartPolicy!": {"Never", "OnFailure"}}}
SERVICE = {
    "apiVersion!": {"v1"}, "kind!": {"Service"}, "metadata!": META,
    "spec!": {
        "clusterIP": str, "publishNotReadyAddresses": bool, "selector": {ANY_KEY: LABEL},
        "ports": [{"name": NAME, "port!": int, "protocol": str, "targetPort": int}],
    },
}  # fmt: skip
JOB = {
    "apiVersion!": {"batch/v1"}, "kind!": {"Job"}, "metadata!": META,
    "spec!": {
        "completionMode": {"NonIndexed", "Indexed"}, "completions": int, "parallelism": int, "backoffLimit": int,
        "activeDeadlineSeconds": int, "ttlSecondsAfterFinished": int, "template!": TEMPLATE,
    },
}  # fmt: skip
REPLICAS = {
    "replicas": int, "restartPolicy": {"Never", "OnFailure", "Always", "ExitCode"},
    "template!": {"metadata": {"labels": {ANY_KEY: LABEL}}, "spec!": POD},  # restartPolicy stands above
}  # fmt: skip
MPI_JOB = {
    "apiVersion!": {"kubeflow.org/v2beta1"}, "kind!": {"MPIJob"}, "metadata!": META,
    "spec!": {
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"}, "slotsPerWorker": int, "runLauncherAsWorker": bool,
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"}, "sshAuthMountPath": str,
        "runPolicy": {
            "cleanPodPolicy": {"None", "Running", "All"}, "backoffLimit": int, "activeDeadlineSeconds": int,
            "ttlSecondsAfterFinished": int, "suspend": bool,
        },
        "mpiReplicaSpecs!": {"Launcher!": REPLICAS, "Worker!": REPLICAS},
    },
}  # fmt: skip
SCHEMAS = {"Service": SERVICE, "Job": JOB, "MPIJob": MPI_JOB}


def problems(value: Any, schema: Any, where: str = "") -> list[str]:
    """Return what in ``value`` the schema does not allow."""
    match schema:
        case dict():
            if not isinstance(value, dict):
                return [f"{where}: {value!r} is no object"]
            known = {key.rstrip("!"): part for key, part in schema.items()}
            required = [key[:-1] for key in schema if key[-1] == "!"]
            found = [f"{where}.{key} is missing" for key in required if key not in value]
            for key, item in value.items():
                part = known.get(key, known.get(ANY_KEY))
                found += [f"{where}.{key} is unknown"] if part is None else problems(item, part, f"{where}.{key}")
            return found
        case [item_schema]:
            if not isinstance(value, list):
                return [f"{where}: {value!r} is no list"]
            return [text for i, item in enumerate(value) for text in problems(item, item_schema, f"{where}[{i}]")]
        case set():
            return [] if value in schema else [f"{where}: {value!r} is none of {sorted(schema)}"]
        case re.Pattern():
            return [] if isinstance(value, str) and schema.fullmatch(value) else [f"{where}: {value!r}"]
    return [] if type(value) is schema else [f"{where}: {value!r} is no {schema.__name__}"]


def documents(name: str) -> dict[str, Any]:
    """Return the documents of a manifest by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / name).read_text())}


@pytest.mark.parametrize(("name", "kinds"), [("torchrun.yaml", {"Service", "Job"}), ("mpijob.yaml", {"MPIJob"})])
def test_fields_and_types(name: str, kinds: set[str]) -> None:
    found = documents(name)
    assert found.keys() == kinds
    assert not [text for kind, document in found.items() for text in problems(document, SCHEMAS[kind], kind)]


OF_JOB = [  # fields that replace those of the Job's spec, and our schema's first problem
    ({"completions": "2"}, "Job.spec.completions: '2' is no int"),
    ({"backofflimit": 0}, "Job.spec.backofflimit is unknown"),
    ({"template": {"spec": {"restartPolicy": "Never"}}}, "Job.spec.template.spec.containers is missing"),
    ({"template": {"spec": {"restartPolicy": "Never", "containers": {}}}}, "Job.spec.template.spec.containers: {}"),
]


@pytest.mark.recipes
@pytest.mark.parametrize("version", ["1.27", "1.37"])  # the first with the label batch.kubernetes.io/job-name; the last
def test_schemas_of_kubernetes(version: str) -> None:
    import kubernetes_validate

    service, job = documents("torchrun.yaml").values()
    pods = documents("mpijob.yaml")["MPIJob"]["spec"]["mpiReplicaSpecs"]
    objects = [{"apiVersion": "v1", "kind": "PodTemplate", "template": pod["template"]} for pod in pods.values()]
    assert len(objects) == 2
    for document in (service, job, *objects):
        assert kubernetes_validate.validate(document, version, strict=True) == version
    for change, _ in OF_JOB:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**job, "spec": job["spec"] | change}, version, strict=True)


def test_no_manifest_is_left_out() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {"torchrun.yaml", "mpijob.yaml"}
    page = FOLDER.with_suffix(".md").read_text()
    assert all(f"](kubernetes/{path.name})" in page for path in FOLDER.iterdir())


@pytest.mark.parametrize(
    ("change", "problem"),
    [*OF_JOB, ({"completionMode": "indexed"}, "Job.spec.completionMode: 'indexed' is none of")],
)
def test_a_mistake_is_found(change: dict[str, Any], problem: str) -> None:
    job = documents("torchrun.yaml")["Job"]
    found = problems({**job, "spec": job["spec"] | change}, JOB, "Job")
    assert [text for text in found if text.startswith(problem)]


def test_the_numbers_and_names_of_the_mpi_job_fit() -> None:
    spec = documents("mpijob.yaml")["MPIJob"]["spec"]
    launcher, worker = spec["mpiReplicaSpecs"]["Launcher"], spec["mpiReplicaSpecs"]["Worker"]
    command = launcher["template"]["spec"]["containers"][0]["command"]
    assert command[:2] == ["mpiexec", "-n"]
    assert int(command[2]) == worker["replicas"] * spec["slotsPerWorker"]
    assert launcher["replicas"] == 1


def test_the_commands_of_the_job(tmp_path: Path) -> None:
    """Two pods on this machine: as many ranks as the Job has pods, with variables that Kubernetes injects."""
    service, job = documents("torchrun.yaml").values()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None"
    shell, option, text = pod["containers"][0]["command"]
    address = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    port, script = str(free_port()), str(SCRIPT)
    for old, new in ((f"addr={address} ", "addr=127.0.0.1 "), ("29500", port), ("train.py", script)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    pods = [f"JOB_COMPLETION_INDEX={i} {shlex.join([shell, option, text])}" for i in range(2)]
    env = {item["name"]: item["value"] for item in pod["containers"][0]["env"]} | {
        "HVDBRIDGE_SERVICE_HOST": "10.96.0.7", "HVDBRIDGE_SERVICE_PORT": "80", "HVDBRIDGE_PORT": "tcp://10.96.0.7:80",
        "HVDBRIDGE_PORT_80_TCP_ADDR": "10.96.0.7", "JOB_RECORDS": str(tmp_path), "TMPDIR": str(tmp_path),
    }  # fmt: skip
    environ = jobs.environment(**env)
    environ["PATH"] = f"{jobs.forking()}:{environ['PATH']}"
    both = f"{pods[0]} & first=$!; {pods[1]}; second=$?; wait $first && exit $second"
    status, left = jobs.launch(["bash", "-c", both], environ, tmp_path / "log", 60)
    assert (status, left) == (0, []), (tmp_path / "log").read_text()[-4000:]
    seen = [yaml.safe_load((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [(r["rank"], r["size"], r["launcher"], r["backend"], r["sum"]) for r in seen] == [
        (0, 2, "torchrun", "torch", 3), (1, 2, "torchrun", "torch", 3)
    ]  # fmt: skip
