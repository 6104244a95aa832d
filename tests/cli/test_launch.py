"""``turnwise launch``: the files are well formed, and the Slurm script does what it says with stand-ins for srun and turnwise."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
import yaml

from turnwise.cli.main import main
from turnwise.errors import SettingError
from turnwise.training.cluster.job_files import ClusterJob, kubernetes_objects, slurm_script

TRAIN = ["grpo", "--model", "my models/it's", "--steps", "9", "--ranks", "2", "--reward", "regex:pattern=a b$"]


def printed(capsys, *words):
    assert main(["launch", *words]) == 0
    said = capsys.readouterr()
    assert "nothing was submitted" in said.err and "NOT RUN" in said.err and "NOT RUN" in said.out
    return said.out


# ---------------------------------------------------------------------- Slurm


def check_syntax(text):
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--servers", "3", "--name", "a.b", "--partition", "gpu", "--account", "me", "--dry-run"],
        ["--setup", "source ~/venv/bin/activate", "--device", "cpu", "--context=400"],
    ],
)
def test_the_sbatch_script_is_bash(capsys, more):
    text = printed(capsys, "slurm", *TRAIN, *more)
    check_syntax(text)
    head = text[: text.index("set -euo")]
    assert text.startswith("#!/bin/bash\n") and head.count("#SBATCH hetjob") == 1
    assert ("--gpus-per-task=2" in head and "--gpus-per-task=1" in head) == ("cpu" not in more)
    assert (head.count("#SBATCH --partition=gpu"), head.count("--ntasks=3")) == (
        (2, 1) if "--servers" in more else (0, 0)
    )
    assert ("serve 'my models" not in text) and ("--context 400 " in text) == ("--context=400" in more)


SRUN = """#!/bin/bash
# stands for Slurm: two tasks for the servers, and as many as NODES says for the trainer; SIGTERM kills them, as srun does
group=$1; shift 2
if [ "$group" = --het-group=0 ]; then tasks=${NODES:-1}; else tasks=2; fi
pids=()
for ((n = 0; n < tasks; n++)); do SLURM_STEP_ID=$group SLURM_PROCID=$n "$@" & pids+=($!); done
echo "${pids[@]}" > "$SLURM_SUBMIT_DIR/$SLURM_JOB_ID.$group"
trap 'kill -KILL "${pids[@]}"' TERM
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
"""
SCANCEL = """#!/bin/bash
[ "$1" = --signal=TERM ] && kill -TERM $(cat "$SLURM_SUBMIT_DIR/$2")
"""
TURNWISE = """#!{python}
import http.server, json, os, signal, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:] + [os.environ["TURNWISE_ENDPOINT_TOKEN"]]) + "\\n")
if sys.argv[1] == "serve":
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
        def log_message(self, *_):
            pass
    http.server.HTTPServer(("0.0.0.0", int(sys.argv[-1].split(":")[1])), Health).serve_forever()
if "HOLD" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    open(os.environ["HOLD"], "w").close()
    signal.pause()
sys.exit(3 if sys.argv[1] == "train" else 0)
"""


def submitter(folder, job):
    """A function that runs the job's script with stand-ins for srun, torchrun and turnwise: its status and their calls."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    tools, calls = folder / "bin", folder / "calls"
    tools.mkdir()
    for name, text in (
        ("srun", SRUN),
        ("scancel", SCANCEL),
        ("torchrun", TURNWISE.format(python=sys.executable)),
        ("turnwise", TURNWISE.format(python=sys.executable)),
        ("hostname", "#!/bin/sh\necho localhost\n"),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (folder / "job.sh").write_text(slurm_script(job))
    environment = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "7", "no_proxy": "*", "NODES": str(job.nodes),
    }  # fmt: skip

    def submit(hold=None):
        """``hold``: the trainer writes this file and waits; then the job is told that its time is almost over."""
        calls.write_text("")
        more = {"HOLD": str(hold)} if hold else {}
        with subprocess.Popen(["bash", "job.sh"], cwd=folder, env={**environment, **more}) as process:
            until = time.monotonic() + 120
            while hold and not hold.exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if hold:
                process.terminate()
            status = process.wait(120)
        return status, [json.loads(line) for line in calls.read_text().splitlines()]

    return submit


def a_port():
    return random.randrange(20000, 60000, 4)


@pytest.mark.slow
def test_the_script_starts_servers_and_then_the_trainer_or_resumes(tmp_path):
    port = a_port()
    job = ClusterJob("a b", TRAIN, ["my models/it's", "--context", "400"], servers=2, ranks=2, port=port)
    submit = submitter(tmp_path, job)
    status, rows = submit()
    assert status == 3  # the trainer's
    token = rows[0][-1]
    assert len(token) == 48 and {row[-1] for row in rows} == {token}
    served = sorted(row[:-1] for row in rows if row[0] == "serve")
    assert served == [
        ["serve", "my models/it's", "--context", "400", "--address", f"0.0.0.0:{port + n}"] for n in (0, 1)
    ]
    remote = [word for n in (0, 1) for word in ("--generator", f"http://localhost:{port + n}")]
    remote += [
        "--generator-key-env",
        "TURNWISE_ENDPOINT_TOKEN",
        "--generator-weights",
        f"{tmp_path}/.turnwise-7/weights",
    ]
    assert rows[-1][:-1] == ["train", *TRAIN, "--name", "a b", *remote]
    assert not (tmp_path / ".turnwise-7").exists()

    (tmp_path / "runs" / "a b").mkdir(parents=True)
    (tmp_path / "runs" / "a b" / "run.json").write_text("{}")
    status, rows = submit()  # queued again
    assert status == 0 and rows[-1][:-1] == ["resume", "runs/a b", *remote]
    status, _ = submit(hold=tmp_path / "held")
    assert status == 7  # the trainer ended by itself: srun did not kill it


@pytest.mark.slow
def test_torchrun_starts_the_ranks_of_each_machine(tmp_path):
    job = ClusterJob("a b", TRAIN, ["my models/it's"], servers=2, ranks=6, nodes=2, port=a_port())
    text = slurm_script(job)
    check_syntax(text)
    memory = 64 * 1024 // 24
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1\n" in text
    assert f"#SBATCH --cpus-per-task=24 --mem-per-cpu={memory}M --gpus-per-task=3\n" in text and "--mem=" not in text
    status, rows = submitter(tmp_path, job)()
    started = sorted(row[:-1] for row in rows if row[0] != "serve")
    assert status == 0 and [row[3] for row in started] == ["0", "1"]
    for row in started:
        launched = ["--nproc-per-node", "3", "--master-addr", "localhost", "--master-port", str(job.port + 2)]
        assert row[:3] == ["--nnodes", "2", "--node-rank"] and row[4:10] == launched
        assert row[10:13] == ["-m", "turnwise", "train"] and row[13 : 13 + len(TRAIN)] == TRAIN
        assert row[13 + len(TRAIN) :][:3] == ["--name", "a b", "--generator"]


# ----------------------------------------------------------------- Kubernetes


def test_the_objects_of_kubernetes(capsys):
    text = printed(
        capsys, "k8s", *TRAIN, "--image", "me/turnwise:1", "--servers", "2", "--name", "My_Run", "--claim", "disk"
    )
    assert "&id" not in text
    service, servers, trainer = yaml.safe_load_all(text)
    assert [o["apiVersion"] + " " + o["kind"] for o in (service, servers, trainer)] == [
        "v1 Service", "apps/v1 StatefulSet", "batch/v1 Job",
    ]  # fmt: skip
    assert service["spec"]["clusterIP"] == "None"  # a headless one gives every pod a name
    assert service["spec"]["selector"] == servers["spec"]["selector"]["matchLabels"]
    labels = servers["spec"]["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] != trainer["spec"]["template"]["metadata"]["labels"]
    assert servers["spec"]["serviceName"] == service["metadata"]["name"] == "my-run-server"
    assert servers["spec"]["replicas"] == 2 and trainer["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    for pod, gpus in ((servers, 1), (trainer, 2)):
        spec = pod["spec"]["template"]["spec"]
        container = spec["containers"][0]
        assert container["image"] == "me/turnwise:1" and container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
        assert spec["volumes"][0]["persistentVolumeClaim"]["claimName"] == "disk"
    assert servers["spec"]["template"]["spec"]["containers"][0]["command"][:3] == [
        "turnwise",
        "serve",
        "my models/it's",
    ]
    script = trainer["spec"]["template"]["spec"]["containers"][0]["command"][2]
    check_syntax(script)
    assert "--generator http://my-run-server-0.my-run-server:8800 --generator http://my-run-server-1." in script
    assert (
        "--name My_Run" in script and "set -- resume runs/My_Run" in script and script.endswith('exec turnwise "$@"\n')
    )


def test_a_pod_of_the_trainer_for_each_machine():
    job = ClusterJob("a", TRAIN, ["tiny"], ranks=6, nodes=2, image="i", port=700)
    ranks, _, _, trainer = kubernetes_objects(job)
    assert ranks["kind"] == "Service" and ranks["spec"]["publishNotReadyAddresses"]  # names before anything listens
    pod = trainer["spec"]["template"]
    assert ranks["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    names = ("completionMode", "completions", "parallelism", "backoffLimit")
    assert [trainer["spec"][name] for name in names] == [
        "Indexed",
        2,
        2,
        6,
    ]  # restarts of all pods are counted together
    assert pod["spec"]["subdomain"] == ranks["metadata"]["name"] == trainer["metadata"]["name"]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 3
    check_syntax(container["command"][2])
    assert (
        'torchrun --nnodes 2 --node-rank "$JOB_COMPLETION_INDEX" --nproc-per-node 3 --master-addr a-trainer-0.a-trainer '
        '--master-port 701 -m turnwise "$@" &'
    ) in container["command"][2]


POD_TORCHRUN = """#!/bin/bash
trap 'echo stopped >> calls; exit 1' TERM
echo "$@" >> calls
if [ "$MODE" = wait ]; then sleep 60 & wait $!; fi
if [ "$MODE" = fail ]; then exit 1; fi
if [ "$MODE" = finish ]; then mkdir -p runs/a; touch runs/a/run.json runs/a/summary.json; fi
"""


@pytest.mark.slow
def test_a_pod_of_ranks_succeeds_only_with_the_run(tmp_path):
    """Ranks 1, 2 ... end with 0 whatever becomes of rank 0; a pod that succeeded would not come back for the next attempt."""
    job = ClusterJob("a", TRAIN, ["tiny"], ranks=6, nodes=2, image="i")
    script = kubernetes_objects(job)[3]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    script = script.replace("/shared/", f"{tmp_path}/").replace("seq 60", "seq 1")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("torchrun", POD_TORCHRUN), ("curl", "#!/bin/sh\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}

    def start(mode):
        return subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env={**environment, "MODE": mode})

    assert start("rank 0 failed").wait(60) == 1
    stopped = start("wait")
    until = time.monotonic() + 60
    while len((tmp_path / "calls").read_text().splitlines()) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    stopped.terminate()  # the pod's deadline: torchrun hears of it
    assert stopped.wait(60) == 1
    assert start("finish").wait(60) == 0 and start("fail").wait(60) == 0  # with a result it never comes back
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "stopped" in calls and "-m turnwise train grpo" in calls[0] and "-m turnwise resume runs/a" in calls[-1]


def test_names_of_services_begin_with_a_letter():
    assert ClusterJob("3b agent", [], []).object_name == "run-3b-agent" and ClusterJob("", [], []).object_name == "run"


def test_without_gpus_none_are_asked_for():
    job = ClusterJob("a", ["grpo"], ["tiny"], on_gpus=False, image="i")
    assert "nvidia" not in str(kubernetes_objects(job)) and "gpu" not in slurm_script(job)


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "words, said",
    [
        (["pbs"], "no kind of cluster 'pbs'"),
        (["slurm", "nonsense"], "no method 'nonsense'"),
        (["slurm", "grpo", "--stepz", "3"], "unknown setting"),
        (["slurm", "grpo", "--servers", "0"], "servers is 0"),
        (["slurm", "grpo", "--generator", "http://a:1"], "--generator is written by launch"),
        (["slurm", "grpo", "--cluster", "local"], "leave --cluster out, or write turnwise train"),
        (
            ["slurm", "grpo", "--port", "99999"],
            "--port is 99999, and the last server would listen on 99999; write at most 65535",
        ),
        (["slurm", "grpo", "--nodes", "0"], "nodes is 0"),
        (
            ["slurm", "grpo", "--ranks", "6", "--nodes", "4"],
            "6 ranks cannot be divided among them evenly; write a multiple of 4",
        ),
        (
            ["slurm", "grpo", "--ranks=2", "--nodes=2", "--port=65535"],
            "torchrun would listen on 65536; write at most 65534",
        ),
        (["slurm", "grpo", "--partition", "a b"], "holds a space"),
        (["k8s", "grpo"], "--image NAME"),
    ],
)
def test_refusals(words, said, capsys):
    assert main(["launch", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_job_needs_numbers():
    with pytest.raises(SettingError, match="port is 0"):
        ClusterJob("a", [], [], port=0)
    with pytest.raises(SettingError, match=r"the last server would listen on 65537; write at most 65533"):
        ClusterJob("a", [], [], port=65_535, servers=3)
    assert ClusterJob("a", [], [], port=65_533, servers=3).port == 65_533
