"""miles's sample, which is much larger there."""

from dataclasses import dataclass, field
from enum import Enum


@dataclass
class Sample:
    class Status(Enum):
        PENDING = "pending"
        ABORTED = "aborted"

    index: int | None = None
    tokens: list = field(default_factory=list)
    rollout_routed_experts: object = None
    multimodal_inputs: object = None
    status: Status = Status.PENDING

    def to_dict(self):
        return {**vars(self), "status": self.status.value}

    @staticmethod
    def from_dict(data):
        return Sample(**{**data, "status": Sample.Status(data["status"])})
