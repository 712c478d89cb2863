"""slime's position in the prompts."""

import os
from pathlib import Path

import torch


class RolloutDataSource:
    def __init__(self, args):
        self.args = args
        self.sample_offset = 0

    def get_samples(self, num_samples):
        self.sample_offset += num_samples
        return list(range(self.sample_offset - num_samples, self.sample_offset))

    def save(self, rollout_id):
        if not self.args.rollout_global_dataset:
            return
        path = os.path.join(self.args.save, f"rollout/global_dataset_state_dict_{rollout_id}.pt")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"sample_offset": self.sample_offset}, path)

    def load(self, rollout_id=None):
        if not self.args.rollout_global_dataset or self.args.load is None:
            return
        path = Path(os.path.join(self.args.load, f"rollout/global_dataset_state_dict_{rollout_id}.pt"))
        if path.exists():
            self.sample_offset = torch.load(path)["sample_offset"]


class RolloutDataSourceWithBuffer(RolloutDataSource):
    def __init__(self, args):
        super().__init__(args)
        self.buffer = []

    def get_samples(self, num_samples):
        taken = self.buffer[:num_samples]
        del self.buffer[:num_samples]
        return taken + super().get_samples(num_samples - len(taken))

    def add_samples(self, samples):
        self.buffer.extend(samples)
