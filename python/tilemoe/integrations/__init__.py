"""The layer in the place of other libraries' experts, and their checkpoints."""
