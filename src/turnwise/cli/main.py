"""The command line. A command parses its flags, calls one function, and prints; it computes nothing itself."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Sequence

from turnwise import __version__
from turnwise.cli import catalogue_commands as catalogue
from turnwise.cli import inspect_commands as looks
from turnwise.cli import mcp_server
from turnwise.cli import run_commands as runs
from turnwise.cli import serve_commands as serving
from turnwise.cli.flags import with_flags
from turnwise.core.text import printable
from turnwise.errors import SettingError, TurnwiseError, causes, nearest, scarcity
from turnwise.models.trust import FLAG, trust_remote_code

TABLE: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (runs.train, "train an agent (turnwise train --help all shows every setting)"),
    "resume": (runs.resume, "continue a stopped run, or extend one (--steps)"),
    "config": (runs.config, "print the effective settings, or those of a run, as a config file"),
    "eval": (runs.evaluate, "evaluate a run, a model, a served model or a scripted policy on held-out tasks"),
    "endpoint": (serving.endpoint, "serve the policy of a run to agents, over HTTP, until interrupted"),
    "serve": (serving.serve, "sample for runs by HTTP (`turnwise train --generator URL`), until interrupted"),
    "launch": (serving.launch, "print files that start servers and a run on Slurm or Kubernetes (not run there)"),
    "environments": (catalogue.list_environments, "list the environments: built in, installed, others to install"),
    "list": (catalogue.list_methods, "list all methods"),
    "explain": (catalogue.explain, "describe one method: equation, paper, slots, hyper-parameters"),
    "diff": (catalogue.diff, "compare two methods slot by slot"),
    "check-env": (catalogue.check_env, "test an environment by playing it and report its problems"),
    "check-agent": (runs.check_agent, "try an agent with scripted policies for a model and report its problems"),
    "check-method": (catalogue.check_method, "test a method's gradient and invariances on synthetic trajectories"),
    "export": (runs.export, "write episodes of a run, or of an environment's scripted policies, as training rows"),
    "push": (runs.push, "upload the model of a finished run, or its adapter, with a model card"),
    "model": (catalogue.model, "download a model by name, or list the available ones"),
    "bench": (catalogue.bench, "measure generation, learning and whole steps, against libraries and hardware limits"),
    "status": (looks.status, "say what a run is doing: who waits for whom, throughput, what holds it up"),
    "view": (looks.view, "open a local page about runs: curves, why a token got its gradient, another method's"),
    "doctor": (looks.doctor, "say what is wrong with a run, with evidence and the setting to change"),
    "replay": (looks.replay, "take one step of a run again, bit for bit or with another method"),
    "compare": (looks.compare, "compare methods or runs: paired seeds, equal token budgets, a stated error rate"),
    "sweep": (looks.sweep, "the same over a grid of settings"),
    "evidence": (looks.evidence, "decide claims of papers by paired runs: play, repeat and check rows, print verdicts"),
    "search": (looks.search, "find what beats a method here, and confirm it on fresh seeds"),
    "audit": (looks.audit, "print where losses of TRL or verl, or a dumped batch, deviate from the recipe"),
    "credit-bench": (looks.credit_bench, "score the credit of every method against the true advantage of each turn"),
    "probe-reward": (looks.probe_reward, "attack an environment's reward and show what wrong behaviour it pays best"),
    "bisect": (looks.bisect, "name the first step, task, token and field at which two runs part"),
    "mcp": (mcp_server.mcp, "let a coding agent start, watch, diagnose and compare runs (Model Context Protocol)"),
}
FUNCTIONS = {name: function for name, (function, _) in TABLE.items()}
COMMANDS = {name: about for name, (_, about) in TABLE.items()}
REASONS = {  # beside what a machine runs out of
    errno.EBADF: "an open file, perhaps the standard output, was closed from elsewhere: an environment, a reward or a library "
    "must not close descriptors that it did not open",
    errno.EROFS: "the file system cannot be written to: write --out another folder",
    errno.EACCES: "permission denied: write --out a folder of your own, or change its permissions",
    errno.EPERM: "not permitted: write --out a folder of your own, or change its permissions",
}


def usage() -> str:
    lines = [f"  turnwise {name:<12} {text}" for name, text in COMMANDS.items()]
    lines.append(f"\n{FLAG}, after a command, lets Python code run that comes with a model. No run remembers it.")
    return "Turnwise trains language-model agents by reinforcement learning over multi-turn rollouts.\n\n" + "\n".join(
        lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"turnwise {__version__}")
        return 0
    try:
        if words[0] not in FUNCTIONS:
            raise SettingError(f"no command {words[0]!r}; {nearest(words[0], FUNCTIONS)}")
        with trust_remote_code(FLAG in words):
            status = FUNCTIONS[words[0]]([word for word in words[1:] if word != FLAG])
            sys.stdout.flush()  # an output that is closed or full is told below, not by the interpreter at its end
            return status
    except TurnwiseError as error:
        print(f"turnwise: {printable(with_flags(str(error)))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        from turnwise.training.interrupt import leave

        print(f"\nturnwise: {printable(stopped) or 'stopped'}", file=sys.stderr)
        return leave(getattr(stopped, "exit_code", 130))
    except BrokenPipeError:
        return 0
    except (OSError, MemoryError, RuntimeError, ImportError) as error:
        if not (reason := explain_scarcity(error)):
            raise
        print(f"turnwise: {reason}", file=sys.stderr)
        return 2


def explain_scarcity(error: BaseException) -> str:
    """What ran out or may not be written, and what to write instead; empty for an error of another kind."""
    denied = [cause for cause in causes(error) if isinstance(cause, OSError) and cause.errno in REASONS]
    refusals = (REASONS[cause.errno or 0] + (f" ({cause.filename})" if cause.filename else "") for cause in denied)
    return scarcity(error) or next(refusals, "")


if __name__ == "__main__":
    sys.exit(main())
