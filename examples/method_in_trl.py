"""A method of Turnwise inside TRL's GRPOTrainer.

TRL keeps data, generation, rewards, checkpoints and logging; Turnwise supplies credit and loss. The model is a random Llama of
32 hidden units, and the reward is the share of token ids that are divisible by 5, so that nothing has to be downloaded.
Without TRL (`pip install 'turnwise-rl[trl]'`) the program prints a message and stops.

    python examples/method_in_trl.py            about 30 seconds on two cores
"""

from __future__ import annotations

import importlib.util
import tempfile

MISSING = "TRL is not installed: pip install 'turnwise-rl[trl]'"


def main(steps: int = 24, method: str = "sapo") -> list[dict] | None:
    """Train; returns TRL's log, or None without TRL."""
    if importlib.util.find_spec("trl") is None:
        print(MISSING)
        return None
    from datasets import Dataset
    from trl import GRPOConfig

    from turnwise.integrations.trl import GRPOTrainer
    from turnwise.models.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer(["say a letter please", "another one", "no, this one"], vocabulary=300)
    model = tiny_model(len(tokenizer), hidden=32, layers=1, seed=0)

    def divisible_by_five(completion_ids, **_):
        return [sum(token % 5 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder, num_generations=8, per_device_train_batch_size=16, max_completion_length=16, num_iterations=2,
            max_steps=steps, learning_rate=1e-2, logging_steps=6, report_to="none", use_cpu=True, save_strategy="no",
        )  # fmt: skip
        data = Dataset.from_dict({"prompt": ["say a letter please", "another one"] * 64})
        trainer = GRPOTrainer(
            model, divisible_by_five, args, train_dataset=data, processing_class=tokenizer, method=method
        )
        trainer.train()
    log = [row for row in trainer.state.log_history if "reward" in row]
    for row in log:
        ours = {
            key: round(value, 3) for key, value in row.items() if key in ("reward", "turnwise/clip_share", "entropy")
        }
        print(f"step {row['step']:3}", ours)
    return log


if __name__ == "__main__":
    main()
