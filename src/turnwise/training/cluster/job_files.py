"""Files that start a run with generator servers on a cluster: an sbatch script for Slurm, objects for Kubernetes. Only text:
nothing is submitted, and nothing here was run on such a cluster.

Both do the same. Servers start, the trainer waits until each answers ``/health``, then it trains, or resumes where a run of
that name exists, so a job that is queued again continues. Weights travel through a folder that all machines see. Ranks on several
machines are started by torchrun, once on each.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from turnwise.errors import SettingError

TOKEN, NAMES = "TURNWISE_ENDPOINT_TOKEN", "TURNWISE_ENDPOINT_NAMES"
NOT_RUN = "Written by `turnwise launch` and NOT RUN on such a cluster: read it, try it with --steps 2 first."
WAIT_SECONDS = 1800  # for every server to load its model
NAME_LENGTH = 40
# seconds that torchrun leaves its ranks for a checkpoint; its default is 30
PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150"
LAST_PORT = 65_535


def _flag(default: Any, text: str) -> Any:
    """What ``turnwise launch`` has a flag for."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ClusterJob:
    """What to start. ``train`` and ``serve`` are the words after ``turnwise train`` and ``turnwise serve``."""

    name: str  # of the run; empty: made from the job's number or the method
    train: Sequence[str]
    serve: Sequence[str]
    out: str = "runs"
    ranks: int = 1
    on_gpus: bool = True
    servers: int = _flag(1, "generator servers, each with one GPU")
    nodes: int = _flag(1, "machines among which torchrun divides the ranks of the trainer")
    cpus: int = _flag(8, "processor cores of each server and rank")
    memory: int = _flag(64, "GiB of memory of each server, and of each machine of the trainer")
    hours: int = _flag(24, "time limit")
    port: int = _flag(8800, "of the first server")
    setup: str = _flag("", "slurm: a shell command before the first `turnwise`, such as source FILE")
    partition: str = _flag("", "slurm: of both parts of the job")
    account: str = _flag("", "slurm")
    image: str = _flag("", "k8s: a container image with turnwise and curl")
    claim: str = _flag("turnwise", "k8s: a volume claim that many pods write, mounted at /shared")

    def __post_init__(self) -> None:
        for name in ("servers", "nodes", "cpus", "memory", "hours", "port"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} is {getattr(self, name)}; write at least 1")
        if self.ranks % self.nodes:
            raise SettingError(
                f"--nodes is {self.nodes}, and {self.ranks} ranks cannot be divided among them evenly; write a multiple of "
                f"{self.nodes} as --ranks, or another --nodes"
            )
        last, listens = self.port + self.servers - 1, "the last server"
        if self.nodes > 1:
            last, listens = self.torchrun_port, "torchrun"
        if last > LAST_PORT:
            raise SettingError(
                f"--port is {self.port}, and {listens} would listen on {last}; write at most {LAST_PORT - last + self.port}"
            )

    @property
    def torchrun_port(self) -> int:
        """The one after those of the servers: they may be on the same machine."""
        return self.port + self.servers

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    def torchrun(self, node: str, address: str) -> str:
        """The words before ``train`` that start the ranks of machine ``node``. Both arguments are words of a shell."""
        return (
            f"torchrun --nnodes {self.nodes} --node-rank {node} --nproc-per-node {self.ranks_per_node} "
            f"--master-addr {address} --master-port {self.torchrun_port} -m turnwise"
        )

    @property
    def object_name(self) -> str:
        """A name that Kubernetes accepts."""
        name = re.sub(r"[^a-z0-9-]+", "-", self.name.lower()).strip("-")[:NAME_LENGTH].strip("-")
        return name if name[:1].isalpha() else f"run-{name}".rstrip("-")  # that of a service begins with a letter


def _words(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


# ----------------------------------------------------------------------- Slurm

SLURM = """\
#!/bin/bash
# {not_run}
# One component for the trainer (ranks: {ranks}, machines: {nodes}), one for the generator servers ({servers}). The submitting
# folder, the model and the folder of the run must be visible on every machine. Submit: sbatch FILE
#SBATCH --job-name={job}
#SBATCH --time={hours}:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@180
{options}#SBATCH --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1
#SBATCH --cpus-per-task={trainer_cpus} --mem-per-cpu={trainer_memory}M{trainer_gpus}
#SBATCH hetjob
{options}#SBATCH --ntasks={servers} --cpus-per-task={cpus} --mem-per-cpu={memory_per_cpu}M{server_gpus}

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
{setup}NAME={name}
RUN={out}/"$NAME"
SHARED="$PWD/.turnwise-$SLURM_JOB_ID"
rm -rf "$SHARED"
mkdir -p "$SHARED/weights"
export SHARED {token}="$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \\n')"

# every server writes where it listens
srun --het-group=1 --cpus-per-task={cpus} bash -c '
  port=$(({port} + SLURM_PROCID))
  export {names}="$(hostname -f)"
  echo "http://${names}:$port" > "$SHARED/server.$SLURM_PROCID"
  exec turnwise serve {serve} --address "0.0.0.0:$port"
' &
SERVERS=$!

wait_for_servers() {{
  local end=$((SECONDS + {wait}))
  for ((n = 0; n < {servers}; n++)); do
    until [ -s "$SHARED/server.$n" ] && curl -fsS "$(cat "$SHARED/server.$n")/health" > /dev/null 2>&1; do
      kill -0 "$SERVERS" || {{ echo "the generator servers have ended" >&2; return 1; }}
      [ "$SECONDS" -lt "$end" ] || {{ echo "server $n does not answer" >&2; return 1; }}
      sleep 2
    done
    GENERATORS+=(--generator "$(cat "$SHARED/server.$n")")
  done
}}
GENERATORS=()
wait_for_servers
REMOTE=("${{GENERATORS[@]}}" --generator-key-env {token} --generator-weights "$SHARED/weights")

if [ -e "$RUN/run.json" ]; then
  COMMAND=(resume "$RUN" "${{REMOTE[@]}}")
else
  COMMAND=(train {train} --name "$NAME" "${{REMOTE[@]}}")
fi
# task 0 writes the number of the step, by which it can be signalled: srun itself would kill its tasks
srun --het-group=0 --cpus-per-task={trainer_cpus} bash -c '
  [ "$SLURM_PROCID" != 0 ] || echo "$SLURM_JOB_ID.$SLURM_STEP_ID" > "$SHARED/step"
  {start_trainer} "$@"
' trainer "${{COMMAND[@]}}" &
TRAINER=$!
# before the time limit the trainer writes a checkpoint; the servers stay until it has ended
trap 'scancel --signal=TERM "$(cat "$SHARED/step")" || kill -TERM "$TRAINER"' TERM
STATUS=0
while kill -0 "$TRAINER" 2> /dev/null; do
  wait "$TRAINER" && STATUS=0 || STATUS=$?
done
kill "$SERVERS" 2> /dev/null || true
wait "$SERVERS" 2> /dev/null || true
rm -rf "$SHARED"
exit "$STATUS"
"""


ONE_MACHINE = "exec turnwise"
SEVERAL_MACHINES = """\
# the machine of rank 0 writes its name; torchrun starts the ranks of each
  [ "$SLURM_PROCID" != 0 ] || hostname -f > "$SHARED/rank0"
  until [ -s "$SHARED/rank0" ]; do sleep 1; done
  export {patience}
  exec {torchrun}"""


def slurm_script(job: ClusterJob) -> str:
    """An sbatch script: a heterogeneous job of one trainer and its servers."""
    options = "".join(
        f"#SBATCH --{name}={value}\n"
        for name, value in (("partition", job.partition), ("account", job.account))
        if value
    )
    if bad := next((v for v in (job.partition, job.account) if re.search(r"\s", v)), ""):
        raise SettingError(f"{bad!r} holds a space; write the name of a partition or account")
    # inside the single quotes of `bash -c '...'`, a quote ends them, an escaped one follows, and they begin again
    serve = _words(job.serve).replace("'", "'\\''")
    return SLURM.format(
        not_run=NOT_RUN,
        job=job.object_name,
        name=shlex.quote(job.name) if job.name else '"run-$SLURM_JOB_ID"',
        out=shlex.quote(job.out),
        train=_words(job.train),
        serve=serve,
        setup=f"{job.setup}\n" if job.setup else "",
        options=options,
        trainer_cpus=job.cpus * job.ranks_per_node,
        trainer_memory=max(1, job.memory * 1024 // (job.cpus * job.ranks_per_node)),
        trainer_gpus=f" --gpus-per-task={job.ranks_per_node}" if job.on_gpus else "",
        start_trainer=ONE_MACHINE
        if job.nodes == 1
        else SEVERAL_MACHINES.format(
            patience=PATIENCE, torchrun=job.torchrun('"$SLURM_PROCID"', '"$(cat "$SHARED/rank0")"')
        ),
        server_gpus=" --gpus-per-task=1" if job.on_gpus else "",
        memory_per_cpu=max(1, job.memory * 1024 // job.cpus),
        token=TOKEN,
        names=NAMES,
        wait=WAIT_SECONDS,
        **{name: getattr(job, name) for name in ("ranks", "nodes", "servers", "hours", "cpus", "port")},
    )


# ------------------------------------------------------------------ Kubernetes

TRAIN_SCRIPT = """\
set -eu
for url in {urls}; do
  until curl -fsS "$url/health" > /dev/null 2>&1; do sleep 2; done
done
mkdir -p {weights}
if [ -e {run}/run.json ]; then
  set -- resume {run} {remote}
else
  set -- train {train} --name {name} {remote}
fi
"""
RANKS_SCRIPT = """\
export {patience}
{torchrun} "$@" &
ranks=$!
trap 'kill -TERM "$ranks"' TERM
status=0
while kill -0 "$ranks" 2> /dev/null; do
  wait "$ranks" && status=0 || status=$?
done
[ "$JOB_COMPLETION_INDEX" != 0 ] || exit "$status"
# other ranks end in peace when rank 0 fails: without a result this pod starts again, as that of rank 0 does, and with one never
for n in $(seq 60); do [ -e {run}/summary.json ] && exit 0; sleep 1; done
exit 1
"""


def kubernetes_objects(job: ClusterJob) -> list[dict[str, Any]]:
    """A headless service and a stateful set of servers, and the job of the trainer; one pod of it for each machine with ranks,
    which find each other by a service of their own."""
    if not job.image:
        raise SettingError(
            "Kubernetes starts containers; write --image NAME, one in which `turnwise` and curl are installed"
        )
    name = job.object_name
    server, labels = f"{name}-server", {"app": "turnwise", "run": name}
    urls = [f"http://{server}-{n}.{server}:{job.port}" for n in range(job.servers)]
    weights, run = f"/shared/.{name}-weights", f"{job.out}/{job.name or name}"
    remote = [word for url in urls for word in ("--generator", url)]
    remote += ["--generator-key-env", TOKEN, "--generator-weights", weights]
    trainer_name = f"{name}-trainer"
    torchrun = job.torchrun('"$JOB_COMPLETION_INDEX"', f"{trainer_name}-0.{trainer_name}")
    script = TRAIN_SCRIPT.format(
        urls=" ".join(urls),
        weights=weights,
        run=shlex.quote(run),
        train=_words(job.train),
        name=shlex.quote(job.name or name),
        remote=_words(remote),
    )
    script += (
        'exec turnwise "$@"\n'
        if job.nodes == 1
        else RANKS_SCRIPT.format(torchrun=torchrun, run=shlex.quote(run), patience=PATIENCE)
    )
    serving = ["turnwise", "serve", *job.serve, "--address", f"0.0.0.0:{job.port}"]
    pod = _pod(job, f"{name}-server", serving, {**labels, "part": "server"}, 1)
    container = pod["spec"]["containers"][0]
    container["env"] += [{"name": NAMES, "value": ",".join(url.split("/")[2].partition(":")[0] for url in urls)}]
    container["ports"] = [{"containerPort": job.port}]
    container["readinessProbe"] = {"httpGet": {"path": "/health", "port": job.port}, "periodSeconds": 5}
    trainer = _pod(job, trainer_name, ["bash", "-c", script], {**labels, "part": "trainer"}, job.ranks_per_node)
    trainer["spec"] |= {"restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 180}
    selector = {**labels, "part": "server"}
    training: dict[str, Any] = {
        "backoffLimit": 3 * job.nodes,
        "activeDeadlineSeconds": job.hours * 3600,
        "template": trainer,
    }
    several: list[dict[str, Any]] = []
    if job.nodes > 1:
        trainer["spec"]["subdomain"] = trainer_name
        training |= {"completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes}
        # the pods find each other by name before they are ready: torchrun meets before anything answers
        meet = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {**labels, "part": "trainer"}}
        meet["ports"] = [{"name": "torchrun", "port": job.torchrun_port}]
        several = [
            {"apiVersion": "v1", "kind": "Service", "metadata": {"name": trainer_name, "labels": labels}, "spec": meet}
        ]
    return [
        *several,
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": server, "labels": labels}}
        | {"spec": {"clusterIP": "None", "selector": selector, "ports": [{"name": "http", "port": job.port}]}},
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": server, "labels": labels}}
        | {"spec": {"serviceName": server, "replicas": job.servers, "podManagementPolicy": "Parallel"}
           | {"selector": {"matchLabels": selector}, "template": pod}},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": trainer_name, "labels": labels}, "spec": training},
    ]  # fmt: skip


def _pod(job: ClusterJob, name: str, command: Sequence[str], labels: dict[str, str], gpus: int) -> dict[str, Any]:
    limits: dict[str, Any] = {"cpu": job.cpus * gpus, "memory": f"{job.memory}Gi"}
    limits |= {"nvidia.com/gpu": gpus} if job.on_gpus else {}
    token = {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": f"{job.object_name}-token", "key": "token"}}}
    container = {
        "name": name,
        "image": job.image,
        "command": list(command),
        "workingDir": "/shared",
        "env": [token],
        "resources": {"requests": limits, "limits": limits},
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}, {"name": "memory", "mountPath": "/dev/shm"}],
    }
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": job.claim}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}}


class _PlainDumper(yaml.SafeDumper):
    """Scripts as blocks of lines; no references between objects."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_PlainDumper.add_representer(str, _PlainDumper.represent_str)


def kubernetes_file(job: ClusterJob) -> str:
    """The objects as one YAML file."""
    objects = yaml.dump_all(kubernetes_objects(job), Dumper=_PlainDumper, sort_keys=False, width=1000)
    name = job.object_name
    about = f"""\
        # {NOT_RUN}
        # The claim {job.claim}, mounted at /shared, must be one that many pods write (ReadWriteMany): model, run and weights.
        # First:  kubectl create secret generic {name}-token --from-literal=token="$(openssl rand -hex 24)"
        # Then:   kubectl apply -f FILE;  kubectl logs -f --prefix -l app=turnwise,run={name},part=trainer
        # After:  kubectl delete statefulset,service -l app=turnwise,run={name}   (the servers do not end by themselves)
        """
    return textwrap.dedent(about) + objects
