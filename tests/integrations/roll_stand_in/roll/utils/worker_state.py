"""ROLL's WorkerState: what the driver keeps."""

import dataclasses
import json
import os
import random

import numpy as np
import torch

WORKER_STATE_NAME = "worker_state_{tag}.json"


@dataclasses.dataclass
class WorkerState:
    step: int = -1
    log_history: list = dataclasses.field(default_factory=list)
    kv: dict = dataclasses.field(default_factory=dict)

    def save_to_json(self, save_dir: str, tag):
        os.makedirs(save_dir, exist_ok=True)
        with open(os.path.join(save_dir, WORKER_STATE_NAME.format(tag=tag)), "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)

    @classmethod
    def load_from_json(cls, load_dir: str, tag):
        with open(os.path.join(load_dir, WORKER_STATE_NAME.format(tag=tag)), encoding="utf-8") as file:
            return cls(**json.load(file))

    @staticmethod
    def save_rng_state(save_dir, tag):
        states = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
            "cuda": [],
        }
        torch.save(states, os.path.join(save_dir, f"rng_state_{tag}.pth"))
