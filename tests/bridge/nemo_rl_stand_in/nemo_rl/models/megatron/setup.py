"""NeMo-RL's set-up of a model, with Megatron-Bridge's own functions."""

from megatron.bridge.models.model_provider import get_model
from megatron.bridge.training.checkpointing import checkpoint_exists, init_checkpointing_context, load_checkpoint
from megatron.bridge.training.initialize import initialize_megatron
from megatron.bridge.training.optim import setup_optimizer
from megatron.bridge.training.state import GlobalState
from megatron.core.process_groups_config import ProcessGroupCollection


def setup_model_and_optimizer(
    policy_cfg,
    megatron_cfg,
    load_optimizer=True,
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    pre_load_checkpoint_hook=None,
    additional_pre_wrap_hooks=None,
    load_weights=True,
):
    state = GlobalState()
    state.cfg = megatron_cfg
    initialize_megatron(cfg=megatron_cfg, allow_no_cuda=True)
    context = init_checkpointing_context(megatron_cfg.checkpoint)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    # NeMo-RL takes the size of the vocabulary from the checkpoint that it has made of the HuggingFace model.
    megatron_cfg.model.vocab_size, megatron_cfg.model.should_pad_vocab = megatron_cfg.tokenizer.vocab_size, True
    megatron_cfg.model.finalize()
    model = get_model(megatron_cfg.model, megatron_cfg.ddp, use_torch_fsdp2=False, pg_collection=groups)
    optimizer, scheduler = setup_optimizer(
        optimizer_config=megatron_cfg.optimizer,
        scheduler_config=megatron_cfg.scheduler,
        model=model,
        use_gloo_process_groups=megatron_cfg.dist.use_gloo_process_groups,
    )
    policy_cfg["before_load"](model, optimizer, scheduler)  # of the tests
    folder = megatron_cfg.checkpoint.load
    if load_weights and folder is not None and checkpoint_exists(folder):
        load_checkpoint(
            state, model, optimizer, scheduler, checkpointing_context=context, skip_load_to_model_and_opt=False
        )
    return state, model[0], optimizer, scheduler, context
