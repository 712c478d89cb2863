"""NeMo-RL's folders of steps, as its driver makes them."""

import json
import os
import re
import shutil
from pathlib import Path


class CheckpointManager:
    def __init__(self, config):
        self.checkpoint_dir = Path(config["checkpoint_dir"])
        self.keep_top_k = config["keep_top_k"]
        self._pending = None

    @staticmethod
    def get_resume_paths(last_checkpoint_path, *, model_component="policy"):
        if not last_checkpoint_path:
            return None, None
        component = Path(last_checkpoint_path) / model_component
        weights, optimizer = component / "weights", component / "optimizer"
        has_optimizer = optimizer.exists() or (weights / "iter_0000000").exists()
        return weights, optimizer if has_optimizer else None

    def init_tmp_checkpoint(self, step, training_info, run_config=None):
        folder = self.checkpoint_dir / f"tmp_step_{step}"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / "training_info.json").write_text(json.dumps(training_info))
        return Path(os.path.abspath(folder))

    def begin_finalization(self, checkpoint_path, wait_fn=None):
        """NeMo-RL: on a thread of its own."""
        self.finalize_pending()
        self._pending = (checkpoint_path, wait_fn)

    def finalize_pending(self):
        if self._pending is None:
            return
        (path, wait), self._pending = self._pending, None
        if wait is not None:
            wait()
        self._rename_checkpoint(path)
        for old in self._steps()[: -self.keep_top_k]:
            shutil.rmtree(old)

    def _rename_checkpoint(self, checkpoint_path):
        path = Path(checkpoint_path)
        os.rename(path, path.parent / path.name.removeprefix("tmp_"))

    def get_latest_checkpoint_path(self):
        steps = self._steps()
        return str(steps[-1]) if steps else None

    def _steps(self):
        found = [path for path in self.checkpoint_dir.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.split("_")[1]))
