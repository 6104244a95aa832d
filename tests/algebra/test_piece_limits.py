"""Limits and defaults of pieces: the last accepted value, the first refused one, and what holds if nothing is written."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
from support.piece_defaults import DEFAULTS

import turnwise.algebra
import turnwise.credit
import turnwise.recipes.families
from turnwise import recipes
from turnwise.errors import TurnwiseError

LIMITS = [  # a method that has the piece, the piece, its argument, accepted values, refused values
    ("bapo", "BalancedClip", "low", (0.0, 0.9), (-1e-06, 0.900001)),
    ("bapo", "BalancedClip", "high", (1.0, 3.0), (0.999999, 3.000001)),
    ("bapo", "BalancedClip", "low_end", (0.6, 1.0), (0.599999, 1.000001)),
    ("bapo", "BalancedClip", "high_end", (1.2,), (1.199999,)),
    ("bapo", "BalancedClip", "statistic", ("gradient",), ("nonsense",)),
    ("opmd", "SoftBaseline", "tau", (1e-06,), (0.0,)),
    ("reinforce", "Sum", "length", (1e-06,), (0.0,)),
    ("archer", "CriticsFirst", "passes", (1,), (0,)),
    ("archer", "CriticsFirst", "warm", (0,), (-1,)),
    ("archer", "CriticsFirst", "epochs", (1,), (0,)),
    ("see_upo", "LastTurnFirst", "turns", (1,), (0,)),
    ("reinforce", "Passes", "epochs", (1,), (0,)),
    ("reinforce", "Passes", "minibatches", (1,), (0,)),
    ("hapo", "NormalisedEntropy", "quantile", (0.0, 1.0), (-1e-06, 1.000001)),
    ("steer", "DampEntropyChange", "low", (1e-06, 1.2), (0.0, 1.200001)),
    ("steer", "DampEntropyChange", "high", (0.8,), (0.799999,)),
    ("steer", "DampEntropyChange", "form", ("linear",), ("nonsense",)),
    ("tis", "TruncatedImportance", "cap", (1e-06,), (0.0,)),
    ("fiberpo", "Fibration", "plus", (0.0,), (-1e-06,)),
    ("fiberpo", "Fibration", "minus", (0.0,), (-1e-06,)),
    ("fiberpo", "Fibration", "eps", (0.0,), (-1e-06,)),
    ("ppo", "GAE", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("ppo", "GAE", "lam", (0.0, 1.0), (-1e-06, 1.000001)),
    ("cispo", "CappedWeight", "high", (0.0,), (-1e-06,)),
    ("cispo", "CappedWeight", "low", (0.0, 5.0), (-1e-06, 5.000001)),
    ("grpo", "Clip", "low", (0.0, 1.0), (-1e-06, 1.000001)),
    ("grpo", "Clip", "high", (0.0,), (-1e-06,)),
    ("vespo", "GammaWeight", "rise", (0.0,), (-1e-06,)),
    ("vespo", "GammaWeight", "decay", (0.0,), (-1e-06,)),
    ("vespo", "GammaWeight", "rise_negative", (0.0,), (-1e-06,)),
    ("vespo", "GammaWeight", "decay_negative", (0.0,), (-1e-06,)),
    ("bpo", "RatioRegression", "temperature", (1e-06,), (0.0,)),
    ("sapo", "SigmoidGate", "pos", (1e-06,), (0.0,)),
    ("sapo", "SigmoidGate", "neg", (1e-06,), (0.0,)),
    ("st_ppo", "DivideByClippingBias", "floor", (1e-06,), (0.0,)),
    ("oblr_po", "ScaleBySignalToNoise", "shares", (2,), (1,)),
    ("alp", "LayerNoise", "sigma", (1e-06,), (0.0,)),
    ("alp", "LayerNoise", "rate", (0.0,), (-1e-06,)),
    ("forking_tokens", "HighestEntropy", "share", (1e-06, 1.0), (0.0, 1.000001)),
    ("mis", "MismatchWithin", "low", (0.0, 2.0), (-1e-06, 2.000001)),
    ("mis", "MismatchWithin", "high", (0.5,), (0.499999,)),
    ("ppo", "ClippedValueLoss", "clip", (1e-06,), (0.0,)),
    ("grpo", "KL", "estimator", ("k3",), ("nonsense",)),
    ("grpo", "WeightedPenalty", "weight", (0.0,), (-1e-06,)),
    ("dapo", "OverlongPenalty", "limit", (64,), (63,)),
    ("dapo", "OverlongPenalty", "cache", (1, 192), (0, 193)),
    ("reinforce_pp", "ReturnToGo", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("safe", "SoftMinValue", "temperature", (1e-06,), (0.0,)),
    ("epo", "DecayingWeight", "half", (1,), (0,)),
    ("dgpo_difficulty", "DifficultyWeighted", "softness", (1e-06,), (0.0,)),
    ("mc_grpo", "StandardiseByMedian", "eps", (1e-06,), (0.0,)),
    ("luffy", "ShapedProbability", "kind", ("ratio",), ("nonsense",)),
    ("luffy", "ShapedProbability", "shape", (1e-06,), (0.0,)),
    ("srpo", "RevisionLoss", "alpha", (0.0, 1.0), (-1e-06, 1.000001)),
    ("echo", "TailConfidenceClip", "least", (0.0, 0.2), (-1e-06, 0.200001)),
    ("echo", "TailConfidenceClip", "most", (0.05, 1.0), (0.049999, 1.000001)),
    ("echo", "TailConfidenceClip", "tail", (1,), (0,)),
    ("echo", "UncertaintyShaped", "most", (1e-06,), (0.0,)),
    ("direct_advantage", "AdvantageRegressionError", "beta", (1e-06,), (0.0,)),
    ("direct_advantage", "StatesWithSpread", "min_spread", (0.0,), (-1e-06,)),
    ("digi_q", "UtteranceCriticError", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("archer", "UtteranceQError", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("archer", "FreshActions", "count", (0,), (-1,)),
    ("b_coder", "ConservativeQError", "alpha", (1e-06,), (0.0,)),
    ("b_coder", "ConservativeQError", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("vas", "ActionValueError", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("vas", "ActionValueError", "lam", (0.0, 1.0), (-1e-06, 1.000001)),
    ("vas", "ValueSteered", "weight", (0.0,), (-1e-06,)),
    ("vas", "ValueSteered", "candidates", (1,), (0,)),
    ("props", "CorrectedSampling", "wave", (1,), (0,)),
    ("props", "SamplingCorrection", "clip", (1e-06, 0.999999), (0.0, 1.0)),
    ("props", "SamplingCorrection", "stop", (1e-06,), (0.0,)),
    ("props", "SamplingCorrection", "epochs", (0,), (-1,)),
    ("props", "SamplingCorrection", "rate", (1e-06,), (0.0,)),
    ("otr", "OneTokenRolloutLoss", "candidates", (1,), (0,)),
    ("otr", "OneTokenRolloutLoss", "negative", (0.0,), (1e-06,)),
    ("scope", "PerplexityWeighted", "tau", (1e-06,), (0.0,)),
    ("dart", "HighestEntropyTurns", "share", (1e-06, 1.0), (0.0, 1.000001)),
    ("d3s", "ShareSchedule", "start", (1e-06, 1.0), (0.0, 1.000001)),
    ("d3s", "ShareSchedule", "end", (1e-06, 1.0), (0.0, 1.000001)),
    ("d3s", "ShareSchedule", "steps", (1,), (0,)),
    ("verl_rank", "CappedBonus", "kappa", (1e-06,), (0.0,)),
    ("verl_rank", "EffectiveRankPotential", "rate", (0.0, 1.0), (-1e-06, 1.000001)),
    ("mssr", "CappedEntropyBonus", "gamma", (1e-06,), (0.0,)),
    ("mssr", "CappedEntropyBonus", "weight", (0.0,), (-1e-06,)),
    ("pipo", "ImprovementWeighted", "window", (1,), (0,)),
    ("pipo", "ImprovementWeighted", "damp", (0.0, 1.0), (-1e-06, 1.000001)),
    ("mssr", "RetentionByKL", "low", (0.0, 0.96), (-1e-06, 0.960001)),
    ("mssr", "RetentionByKL", "high", (0.875, 1.0), (0.874999, 1.000001)),
    ("mssr", "RetentionByKL", "window", (1,), (0,)),
    ("mssr", "RetentionByKL", "target", (1e-06,), (0.0,)),
    ("chord", "WarmupCosine", "warmup", (0,), (-1,)),
    ("chord", "WarmupCosine", "decay", (0,), (-1,)),
    ("chord", "WarmupCosine", "peak", (0.0, 1.0), (-1e-06, 1.000001)),
    ("chord", "WarmupCosine", "valley", (0.0, 1.0), (-1e-06, 1.000001)),
    ("chord", "WeightedNegativeLogLikelihood", "weight", ("none",), ("nonsense",)),
    ("chord", "WeightedNegativeLogLikelihood", "cutoff", (1e-06, 1.0), (0.0, 1.000001)),
    ("igpo", "AnswerProbabilityGain", "weight", (0.0,), (-1e-06,)),
    ("infopo", "ExponentialDecay", "rate", (0.0,), (-1e-06,)),
    ("infopo", "LowSpreadGate", "temperature", (1e-06,), (0.0,)),
    ("xrpo", "NoveltyBonus", "weight", (0.0,), (-1e-06,)),
    ("xrpo", "NoveltyBonus", "cap", (0.0,), (-1e-06,)),
    ("capo_calibration", "PairwiseCalibration", "tau", (1e-06,), (0.0,)),
    ("capo_calibration", "PairwiseCalibration", "high", (0.0,), (-1e-06,)),
    ("capo_calibration", "PairwiseCalibration", "low", (0.0,), (-1e-06,)),
    ("unlikeliness", "UnlikelinessReward", "beta", (0.0, 1.0), (-1e-06, 1.000001)),
    ("a2fm", "CheapestModePays", "alpha", (1e-06,), (0.0,)),
    ("a2fm", "CheapestModePays", "easy", (1e-06, 1.0), (0.0, 1.000001)),
    ("bnpo", "BetaNormalised", "bottom", (0.999999,), (1.0,)),
    ("bnpo", "BetaNormalised", "top", (1e-06,), (0.0,)),
    ("gdpo", "StandardiseOverBatch", "over", ("rows",), ("nonsense",)),
    ("polychromic", "UnitOutcome", "bottom", (0.999999,), (1.0,)),
    ("polychromic", "UnitOutcome", "top", (1e-06,), (0.0,)),
    ("discopop", "BlendedLoss", "tau", (1e-06,), (0.0,)),
    ("kto", "ProspectLoss", "beta", (1e-06,), (0.0,)),
    ("exo", "ReverseKLLoss", "eps", (1e-06, 0.999999), (0.0, 1.0)),
    ("srgpo", "RandomGroups", "size", (-1, 1), (0,)),
    ("srgpo", "RandomGroups", "within", ("batch",), ("nonsense",)),
    ("mars", "SameAgent", "game", ("group",), ("nonsense",)),
    ("gigpo", "SameTask", "unit", ("turn",), ("nonsense",)),
    ("rdpo", "FlipCorrected", "flip", (0.0, 1e-06), (-1e-06, 0.5)),
    ("rdpo", "FlipCorrected", "bound", (1e-06,), (0.0,)),
    ("dpo", "LabelSmoothed", "eps", (0.0, 1.0), (-1e-06, 1.000001)),
    ("r1v2", "LogisticLoss", "beta", (1e-06,), (0.0,)),
    ("inpo", "MixedReferenceScore", "eta", (0.0025,), (0.002499,)),
    ("inpo", "MixedReferenceScore", "tau", (0.0, 0.0075), (-1e-06, 0.007501)),
    ("inpo", "SquaredMarginLoss", "beta", (1e-06,), (0.0,)),
    ("remix", "ResetReference", "at", (0,), (-1,)),
    ("remix", "ResetReference", "every", (0,), (-1,)),
    ("direct_advantage", "ActiveBatches", "scale", (0.0,), (-1e-06,)),
    ("direct_advantage", "ActiveBatches", "begin", (0,), (-1,)),
    ("direct_advantage", "ActiveBatches", "end", (0,), (-1,)),
    ("oapl", "SamplerRegressionError", "beta", (1e-06,), (0.0,)),
    ("hgpo", "HierarchyOfGroups", "history", (0,), (-1,)),
    ("hgpo", "HierarchyOfGroups", "alpha", (0.0,), (-1e-06,)),
    ("gigpo", "SameRecentStates", "states", (1,), (0,)),
    ("salt", "SameTransition", "window", (0,), (-1,)),
    ("r3l", "AmplifiedPositive", "alpha", (0.0,), (-1e-06,)),
    ("spo_chain", "ProbabilityBelow", "limit", (1e-06,), (0.0,)),
    ("arpo_gui", "FailedGroups", "max_std", (1e-06,), (0.0,)),
    ("spear", "CosineWarmup", "scale", (0.0,), (-1e-06,)),
    ("spear", "CosineWarmup", "steps", (1e-06,), (0.0,)),
    ("spear", "DropHighCovariance", "fraction", (0.0, 1.0), (-1e-06, 1.000001)),
    ("spear", "NonNegativeReplay", "oldest", (0,), (-1,)),
    ("spear", "NonNegativeReplay", "size", (1,), (0,)),
    ("spear", "PastMedian", "window", (1,), (0,)),
    ("spear", "PastMedian", "statistic", ("mean",), ("nonsense",)),
    ("spear", "ToolCallBonus", "horizon", (1e-06,), (0.0,)),
    ("copo", "ClipEachPart", "low", (0.0, 1.0), (-1e-06, 1.000001)),
    ("copo", "ClipEachPart", "high", (0.0,), (-1e-06,)),
    ("polychromic", "SetAdvantage", "size", (1,), (0,)),
    ("fapo", "FlawPenalisedOutcome", "penalty", (0.0,), (-1e-06,)),
    ("rlfr", "FlowOutlierScore", "threshold", (0.0, 1.0), (-1e-06, 1.000001)),
    ("rlfr", "FlowOutlierScore", "top", (0,), (-1,)),
    ("gcpo", "GroupContrast", "threshold", (0.0,), (-1e-06,)),
    ("gcpo", "NormalisedLength", "longest", (1,), (0,)),
    ("promed", "ShapleyInformationGain", "temperature", (1e-06,), (0.0,)),
    ("otc", "ToolEfficiencyReward", "slack", (1e-06,), (0.0,)),
    ("digirl", "GoodSteps", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("digirl", "TopOfBatch", "share", (1e-06, 1.0), (0.0, 1.000001)),
    ("stratified_grpo", "Blend", "share", (0.0, 1.0), (-1e-06, 1.000001)),
    ("canon", "ConditionalAdvantage", "mu", (0.0, 1.0), (-1e-06, 1.000001)),
    ("canon", "ConditionalAdvantage", "alpha", (0.0,), (-1e-06,)),
    ("canon", "ConditionalAdvantage", "metric", ("entropy",), ("nonsense",)),
    ("adora", "LengthDampedGroups", "damp", (0.0,), (-1e-06,)),
    ("stratified_grpo", "SameCount", "what", ("tool_calls",), ("nonsense",)),
    ("risk_po", "TailRisk", "bundle", (1,), (0,)),
    ("risk_po", "TailRisk", "a", (1e-06, 0.799999), (0.0, 0.8)),
    ("risk_po", "TailRisk", "b", (0.200001, 0.999999), (0.2, 1.0)),
    ("risk_po", "TailRisk", "omega", (0.0,), (-1e-06,)),
    ("risk_po", "TailRisk", "eta", (0.0,), (-1e-06,)),
    ("risk_po", "TailRisk", "mode", ("track",), ("nonsense",)),
    ("risk_po", "TailRisk", "share", ("sum-mean",), ("nonsense",)),
    ("spo_single", "RetentionByDrift", "half", (1e-06,), (0.0,)),
    ("spo_single", "RetentionByDrift", "low", (0.0, 0.96), (-1e-06, 0.960001)),
    ("spo_single", "RetentionByDrift", "high", (0.875, 1.0), (0.874999, 1.000001)),
    ("mssr", "SuccessTracker", "strength", (1e-06,), (0.0,)),
    ("bilevel_gae", "BiLevelGAE", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("bilevel_gae", "BiLevelGAE", "lam", (0.0, 1.0), (-1e-06, 1.000001)),
    ("bilevel_gae", "BiLevelGAE", "turn_gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("trloo", "LeaveOneOutAtTurn", "absent", ("out",), ("nonsense",)),
    ("ui_s1", "ReturnUntilMismatch", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
    ("igpo", "SumToGo", "gamma", (0.0, 1.0), (-1e-06, 1.000001)),
]  # fmt: skip


def pieces_of(value: Any) -> Iterator[Any]:
    """Every piece of a recipe, at any depth."""
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from pieces_of(getattr(value, field.name))
    elif isinstance(value, tuple | list | frozenset):
        for item in value:
            yield from pieces_of(item)


def classes() -> dict[str, type]:
    """Public dataclasses of the rooms of pieces, by name."""
    made = {}
    for room in (turnwise.algebra, turnwise.credit, turnwise.recipes.families):
        for found in pkgutil.iter_modules(room.__path__):
            module = importlib.import_module(f"{room.__name__}.{found.name}")
            made |= {n: c for n, c in vars(module).items() if isinstance(c, type) and c.__module__ == module.__name__}
    return {name: cls for name, cls in made.items() if dataclasses.is_dataclass(cls)}


def test_the_last_value_inside_is_accepted_and_the_first_outside_is_refused():
    made = {name: recipes.build(name) for name in {row[0] for row in LIMITS}}
    for method, piece, argument, accepted, refused in LIMITS:
        one = next(p for p in pieces_of(made[method]) if type(p).__name__ == piece)
        for value in accepted:
            assert getattr(dataclasses.replace(one, **{argument: value}), argument) == value, (piece, argument)
        for value in refused:
            with pytest.raises(TurnwiseError):
                dataclasses.replace(one, **{argument: value})
                pytest.fail(f"{piece} accepts {argument}={value}")


def test_what_is_not_written_has_the_listed_value():
    """Numbers of papers: a change of one is a change of method for everybody who composes by hand, so it needs a line here."""
    every = classes()
    for piece, listed in DEFAULTS.items():
        signature = inspect.signature(every[piece])
        assert {name: signature.parameters[name].default for name in listed} == listed, piece
