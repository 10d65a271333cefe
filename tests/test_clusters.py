"""Examples for cluster managers: what they start is what Terrazzo takes, in the fields that the manager knows."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from terrazzo.config import load_config
from tests.helpers.processes import Pool

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "examples/clusters"


def trained(command: str) -> list[str]:
    """The settings of the training that a shell's words start; they are those of a valid configuration."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[words.index("-m") + 1] == "terrazzo"
    path, *settings = words[words.index("train") + 1 :]
    path = path if (ROOT / path).exists() else "examples/quickstart.yaml"
    mesh = [re.sub(r"\$\w+", "2", word) for word in settings]
    load_config(ROOT / path, mesh)
    assert "checkpoint.resume=if_exists" in settings
    return settings


def test_a_pytorchjob_has_the_fields_that_its_operator_reads() -> None:
    job: dict[str, Any] = yaml.safe_load((CLUSTERS / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() <= {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
    assert isinstance(spec["nprocPerNode"], str)
    known = {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "suspend", "ttlSecondsAfterFinished"}
    assert spec["runPolicy"].keys() <= known | {"managedBy", "schedulingPolicy"}
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    replicas = spec["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    machines = sum(each["replicas"] for each in replicas.values())
    for each in replicas.values():
        assert each.keys() == {"replicas", "restartPolicy", "template"}
        assert each["restartPolicy"] in ("Always", "ExitCode", "Never", "OnFailure")
        pod = each["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
        assert container["command"] == ["bash", "-c"]
        (command,) = container["args"]
        assert command.startswith("exec torchrun ")
        assert f"plan.mesh.dp_replicate={machines}" in trained(command)


def test_a_task_of_skypilot_has_its_fields_and_variables() -> None:
    task: dict[str, Any] = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    assert task.keys() <= {"name", "num_nodes", "resources", "workdir", "file_mounts", "setup", "run", "envs"}
    assert task["resources"].keys() <= {"accelerators", "cloud", "region", "use_spot", "job_recovery", "any_of"}
    variables = set(re.findall(r"\$(SKYPILOT_\w+)", task["run"]))
    assert variables == {
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NUM_GPUS_PER_NODE",
        "SKYPILOT_NODE_IPS",
    }
    settings = trained(task["run"])
    (folder,) = [word for word in settings if word.startswith("checkpoint.folder=")]
    assert any(folder.startswith(f"checkpoint.folder={mount}/") for mount in task["file_mounts"])
    shown = {name: str(number) for number, name in enumerate(sorted(variables), 2)} | {"SKYPILOT_NODE_IPS": "a\nb"}
    script = "torchrun() { printf '%s\\n' \"$@\"; }\n" + task["run"]
    said = subprocess.run(
        ["bash", "-euc", script], env={**shown, "HOME": "/h", "PATH": "/usr/bin:/bin"}, capture_output=True
    )
    words = said.stdout.decode().split("\n")
    assert words[words.index("--master-addr") + 1] == "a"


def losses_of_the_loop() -> list[float]:
    made: dict[str, Any] = runpy.run_path(str(CLUSTERS / "ray_train.py"))
    return list(made["loop"]({"plan": "zero3", "steps": 40}))


@pytest.mark.processes
def test_the_loop_for_ray_learns_in_a_group_that_is_there(two_processes: Pool) -> None:
    for losses in two_processes.run(losses_of_the_loop):
        assert losses[-1] < losses[0] / 2


@pytest.mark.long
def test_the_script_for_ray_runs_under_it() -> None:
    pytest.importorskip("ray.train", reason="Ray is not installed")
    done = subprocess.run([sys.executable, str(CLUSTERS / "ray_train.py")], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("{'loss': "))
    assert "Checkpoint(" in said
