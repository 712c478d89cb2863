"""ROLL's actor of the RLVR pipeline."""

from roll.pipeline.base_worker import ActorWorker as BaseActorWorker


class ActorWorker(BaseActorWorker):
    pass
