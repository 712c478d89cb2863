"""Getting bytes off the training path."""
