"""The gradients of a node that torch's engine passes on, read while the node runs.

`needs_input_grad` is set in forward. A walk of the graph may need fewer gradients: autograd.grad
and backward(inputs=) name their inputs, and a pipeline's split backward walks the graph once for
the input and once for the weights."""

import torch

_running = getattr(torch._C, "_current_autograd_node", lambda: None)
_will_execute = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
# Whether the walk has no `inputs`, and so runs every edge; reentrant checkpoints require it.
_runs_all = getattr(torch.autograd, "_is_checkpoint_valid", lambda: False)


def needed_now(ctx):
    """The inputs whose gradients are needed, one bit each: those of ctx.needs_input_grad, without
    the inputs whose edge the engine does not run.

    All of them if the engine does not report it: while torch.compile traces, under compiled
    autograd, and for a node that is called without the engine. Inputs that are outputs of one node
    share an edge and count together."""
    needed = [i for i, need in enumerate(ctx.needs_input_grad) if need]
    if torch.compiler.is_compiling() or _running() is not ctx or _runs_all():
        return sum(1 << i for i in needed)
    bits = 0
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    for i, node in zip(needed, nodes, strict=True):
        try:
            runs = _will_execute(node)
        except RuntimeError:  # torch raises it for a leaf that autograd.grad received as an input
            runs = True
        bits |= runs << i
    return bits
