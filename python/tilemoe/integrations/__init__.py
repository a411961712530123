"""Replace the experts of other libraries, and convert their checkpoints."""
