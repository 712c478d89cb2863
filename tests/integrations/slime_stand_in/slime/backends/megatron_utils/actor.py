"""slime's actor, without ray: what it does with checkpoints."""

from .checkpoint import load_checkpoint
from .initialize import init
from .model import initialize_model_and_optimizer, save


class MegatronTrainRayActor:
    def init(self, args, role, with_ref=False, with_opd_teacher=False):
        self.args, self.role = args, role
        init(args)
        self.model, self.optimizer, self.opt_param_scheduler, loaded = initialize_model_and_optimizer(args, role)
        if with_ref:
            self.load_other_checkpoint("ref", args.ref_load)
        if args.offload_train:
            self.sleep()
        return loaded + 1

    def save_model(self, rollout_id, force_sync=False):
        if self.args.offload_train:
            self.wake_up()
        if self.args.async_save:
            from megatron.training.async_utils import maybe_finalize_async_save

            maybe_finalize_async_save(blocking=True)
        save(rollout_id, self.model, self.optimizer, self.opt_param_scheduler)
        if force_sync and self.args.async_save:
            maybe_finalize_async_save(blocking=True)
        if self.args.offload_train:
            self.sleep()

    def load_other_checkpoint(self, model_tag, path):
        names = ("load", "no_load_optim", "no_load_rng", "finetune", "ckpt_step")
        before = {name: getattr(self.args, name) for name in names}
        self.args.load = path
        self.args.no_load_optim = self.args.no_load_rng = self.args.finetune = True
        if model_tag == "ref" and self.args.ref_ckpt_step is not None:
            self.args.ckpt_step = self.args.ref_ckpt_step
        load_checkpoint(self.model, None, None, checkpointing_context={}, skip_load_to_model_and_opt=False)
        vars(self.args).update(before)

    def sleep(self):
        """slime gives the memory of parameters and optimizer back, and destroys the process groups."""

    def wake_up(self):
        """slime makes both again."""
