"""miles' functions that save and that make a model and load it."""

from .checkpoint import load_checkpoint, save_checkpoint, save_checkpoint_with_lora
from .lora_utils import is_lora_model


def setup_model_and_optimizer(args, role="actor"):
    raise NotImplementedError("the test makes the model")


def save(iteration, model, optimizer, opt_param_scheduler, checkpointing_context=None, non_persistent_ckpt=False):
    if is_lora_model(model):
        save_checkpoint_with_lora(iteration, model, optimizer, opt_param_scheduler)
        return
    save_checkpoint(
        iteration,
        model,
        optimizer,
        opt_param_scheduler,
        num_floating_point_operations_so_far=0,
        train_data_iterator=None,
        preprocess_common_state_dict_fn=None,
        checkpointing_context=checkpointing_context,
        non_persistent_ckpt=non_persistent_ckpt,
    )


def initialize_model_and_optimizer(args, role="actor", checkpointing_context=None):
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
    model[0].role = role
    iteration, _ = load_checkpoint(
        model,
        optimizer,
        opt_param_scheduler,
        checkpointing_context=checkpointing_context,
        skip_load_to_model_and_opt=False,
    )
    return model, optimizer, opt_param_scheduler, iteration
