"""Every use of another package's private interface, with the versions it is tested with.

Releases of TRL and verl may change private methods without notice. We override some of TRL's: if one is renamed, our override
is never called and TRL trains with its own loss, without any error. Hence three cases when an integration is imported:

    older than tested     ImportError: the interface is known to differ
    tested                accepted
    newer than tested     every private name must exist with the parameters we use, else ImportError; then a warning

A newer release is not refused by its number alone: most of them change nothing we use, and a user who must upgrade for another
reason should be able to. Importing this module imports neither TRL nor verl. Knows no method and computes no loss.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from torch import Tensor

TRL_TESTED = (">=1.16", "<1.17")
VERL_TESTED = (">=0.9", "<0.10")

# Private methods of trl.GRPOTrainer (the last three are inherited from transformers.Trainer) and the parameters we rely on
TRL_METHODS: dict[str, tuple[str, ...]] = {
    "_calculate_rewards": (),
    "_generate_and_score_completions": ("inputs",),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss",
    ),
    "_save_checkpoint": ("model", "trial"),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_get_output_dir": ("trial",),
}  # fmt: skip
TRL_ATTRIBUTES = ("_logs", "_metrics", "_step", "_buffered_inputs")  # set by its constructor
VERL_NAMES = ("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY", "register_policy_loss", "register_adv_est", "agg_loss")


# ------------------------------------------------------------------- versions


def release(number: str) -> tuple[int, ...]:
    """The numbers of a version, without pre-release and local parts.

    >>> release("1.16.0.dev0"), release("0.9.1+cu128"), release("1.17rc1")
    ((1, 16, 0), (0, 9, 1), (1, 17))
    """
    match = re.match(r"\d+(\.\d+)*", number)
    return tuple(map(int, match.group(0).split("."))) if match else ()


def compare(installed: str, tested: tuple[str, str]) -> int:
    """−1, 0 or 1: older than the tested versions, one of them, newer.

    >>> [compare(version, (">=1.16", "<1.17")) for version in ("1.15.2", "1.16", "1.16.3", "1.17.0", "2.0")]
    [-1, 0, 0, 1, 1]
    """
    number, lowest, first_untested = release(installed), release(tested[0][2:]), release(tested[1][1:])
    return -1 if number < lowest else 1 if number >= first_untested else 0


def require_version(package: str, installed: str, tested: tuple[str, str], missing: Sequence[str] = ()) -> None:
    """Raise ImportError for an unusable version, warn of an untested one. ``missing``: private names it lacks or changed."""
    bounds, order = ",".join(tested), compare(installed, tested)
    install = f"pip install '{package}{bounds}'"
    if order < 0:
        raise ImportError(f"turnwise.integrations.{package} needs {package} {bounds}, found {installed}: {install}")
    if missing:
        changed = (
            f"{package} {installed} lacks or changed what turnwise.integrations.{package} uses: {', '.join(missing)}"
        )
        raise ImportError(f"{changed}. Tested with {bounds}: {install}")
    if order > 0:
        newer = f"{package} {installed} is newer than the versions turnwise is tested with ({bounds})"
        cure = f"everything it uses is still there, but compare a short run, or {install}"
        warnings.warn(f"{newer}; {cure}", stacklevel=3)


def _missing(package: str, name: str, tested: tuple[str, str], error: ImportError) -> ImportError:
    bounds, needs = ",".join(tested), f"turnwise.integrations.{package} needs {name}"
    return ImportError(f"{needs} {bounds}: pip install '{package}{bounds}' ({error})")


def changed_methods(owner: type, methods: Mapping[str, Sequence[str]]) -> list[str]:
    """The methods that ``owner`` lacks, or whose signature lacks a parameter we use."""
    changed = []
    for name, parameters in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            changed.append(f"{owner.__name__}.{name}")
            continue
        signature = inspect.signature(method).parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in signature.values())
        changed += [f"{owner.__name__}.{name}({p})" for p in parameters if p not in signature and not any_keyword]
    return changed


# ------------------------------------------------------------------------ TRL


_Trainer: Any = object  # stands for trl.GRPOTrainer, which is not imported here


class TRLHooks(_Trainer):
    """A mixin before ``trl.GRPOTrainer`` that turns its private methods into hooks with public names.

    A trainer implements ``on_rewards``, ``on_generation``, ``policy_loss``, ``save_state`` and ``load_state``."""

    _tag_names = ["trl", "grpo", "turnwise"]  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if missing := [f"GRPOTrainer.{name}" for name in TRL_ATTRIBUTES if not hasattr(self, name)]:
            import trl

            require_version("trl", trl.__version__, TRL_TESTED, missing)

    # ---- overridden
    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self.on_rewards(rewards)
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return self.on_generation(super()._generate_and_score_completions(inputs))

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        return self.policy_loss(model, inputs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            self.save_state(os.path.join(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            self.load_state(checkpoint)

    # ---- called
    def logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return self._get_per_token_logps_and_entropies(*args, compute_entropy=True, **kwargs)

    def slices_of_step(self) -> list[dict[str, Any]]:
        """All slices of the optimiser step that begins now."""
        first, count = self._step % self.args.steps_per_generation, self.current_gradient_accumulation_steps
        slices: list[dict[str, Any]] = self._buffered_inputs[first : first + count]
        assert len(slices) == count, "an optimiser step reaches into the next generation"
        return slices

    def logged_metrics(self) -> Any:
        """Metric name → values since the last log, of training or of evaluation."""
        return self._metrics["train" if self.model.training else "eval"]

    def replace_logged_advantages(self, advantages: Sequence[float]) -> None:
        """Show ours instead of TRL's own in its table of completions."""
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages))):
            logged.pop()
        logged.extend(advantages)


def trl_trainer_base() -> Any:
    """``trl.GRPOTrainer`` with :class:`TRLHooks`, after checking the installed version."""
    try:
        import trl
        from trl import GRPOTrainer
    except ImportError as error:
        raise _missing("trl", "TRL", TRL_TESTED, error) from None  # it names the cause
    require_version("trl", trl.__version__, TRL_TESTED, changed_methods(GRPOTrainer, TRL_METHODS))
    return type("TRLTrainerBase", (TRLHooks, GRPOTrainer), {})


# ----------------------------------------------------------------------- verl


def verl_algorithms() -> Any:
    """verl's module of policy losses and advantage estimators, checked."""
    try:
        from verl.trainer.ppo import core_algos
    except ImportError as error:
        raise _missing("verl", "verl", VERL_TESTED, error) from None
    missing = [f"core_algos.{name}" for name in VERL_NAMES if not hasattr(core_algos, name)]
    require_version("verl", version("verl"), VERL_TESTED, missing)
    return core_algos


def unregister_from_verl(core_algos: Any, name: str) -> None:
    # verl refuses to register a name twice and has no function to remove one
    for registry in (core_algos.POLICY_LOSS_REGISTRY, core_algos.ADV_ESTIMATOR_REGISTRY):
        registry.pop(name, None)
