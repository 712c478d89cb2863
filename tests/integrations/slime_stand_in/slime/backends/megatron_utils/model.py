"""slime's functions that save and that make a model and load it."""

from .checkpoint import load_checkpoint, save_checkpoint


def setup_model_and_optimizer(args, role="actor"):
    raise NotImplementedError("the test makes the model")


def save(iteration, model, optimizer, opt_param_scheduler):
    save_checkpoint(
        iteration,
        model,
        optimizer,
        opt_param_scheduler,
        num_floating_point_operations_so_far=0,
        checkpointing_context=None,
        train_data_iterator=None,
        preprocess_common_state_dict_fn=None,
    )


def initialize_model_and_optimizer(args, role="actor"):
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(args, role)
    model[0].role = role
    iteration, _ = load_checkpoint(
        model, optimizer, opt_param_scheduler, checkpointing_context={}, skip_load_to_model_and_opt=False
    )
    return model, optimizer, opt_param_scheduler, iteration


def _critic_output_layer_needs_reinit(args, model, role):
    """slime: from the metadata of Megatron-LM's checkpoint, before it is loaded."""
    return False
