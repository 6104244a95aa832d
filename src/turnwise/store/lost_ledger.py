"""A run whose ledger is gone and whose checkpoints are intact: a new ledger, and what it does not know."""

from __future__ import annotations

from turnwise.errors import SettingError
from turnwise.store.atomic import write_json
from turnwise.store.ledger import SqliteLedger
from turnwise.store.rundir import CHECKPOINT_NAME, RunDir


def begin_ledger(run_dir: RunDir) -> None:
    """A new ledger in place of a lost one, at the checkpoints that are there, because a user asks for it. What was trained on
    before stays unknown, groups in flight are not issued again, and ``run.json`` records from which step on it knows."""
    if not run_dir.step:
        raise SettingError(
            f"{run_dir.path} has no checkpoint, so nothing is lost; leave --new-ledger out, and it begins again"
        )
    if not run_dir.ledger.is_file():
        for name in ("-wal", "-shm"):  # SQLite would read into the new file what the lost one had not taken in
            run_dir.ledger.with_name(run_dir.ledger.name + name).unlink(missing_ok=True)
    with SqliteLedger(run_dir.ledger) as ledger:
        if ledger.group_counts().issued:
            raise SettingError(f"{run_dir.ledger} is there; leave --new-ledger out, or move a damaged file away first")
        metadata = run_dir.metadata()
        lost = {"after_step": run_dir.step, "ledger": ["lost", "new"]}
        write_json(run_dir.settings, {**metadata, "changes": [*metadata.get("changes", []), lost]})
        for path in sorted(run_dir.checkpoints.glob("step-*")):
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match and ledger.digest(int(match[1])) is None:
                ledger.seal(int(match[1]))


def ledger_since(run_dir: RunDir) -> int:
    """The step from which on the ledger of a run knows what was trained on: 0, unless it replaces a lost one."""
    return max(
        (change["after_step"] for change in run_dir.metadata().get("changes", ()) if "ledger" in change), default=0
    )
