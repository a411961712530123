"""The gradients of a node that torch's engine passes on, read while the node runs.

`needs_input_grad` is set in forward. A walk of the graph may need fewer gradients: autograd.grad
and backward(inputs=) name their inputs, and a pipeline's split backward walks the graph once for
the input and once for the weights."""

import torch

_running = getattr(torch._C, "_current_autograd_node", lambda: None)
_will_execute = getattr(torch._C, "_will_engine_execute_node", lambda node: True)


def needed_now(ctx):
    """The inputs whose gradients are needed, one bit each: those of ctx.needs_input_grad, without
    the inputs whose edge the engine does not run.

    All of them if the engine does not report it: while torch.compile traces, under compiled
    autograd, and for a node that is called without the engine. Inputs that are outputs of one node
    share an edge and count together."""
    needs, nodes = ctx.needs_input_grad, None
    if not torch.compiler.is_compiling() and _running() is ctx:
        nodes = iter([node for node, _ in ctx.next_functions if node is not None])  # one a need
    bits = 0
    for i, need in enumerate(needs):
        if need and (nodes is None or _runs(next(nodes))):
            bits |= 1 << i
    return bits


def _runs(node):
    try:
        return _will_execute(node)
    except RuntimeError:  # torch raises it for a leaf that autograd.grad received as an input
        return True
