"""Read which gradients of a node torch's engine passes on, while the node runs.

`needs_input_grad` is set in forward. A backward pass may need fewer gradients: autograd.grad and
backward(inputs=) name their inputs, and a pipeline's split backward runs the graph once for the
input and once for the weights.
"""

import torch

_running = getattr(torch._C, "_current_autograd_node", lambda: None)
_will_execute = getattr(torch._C, "_will_engine_execute_node", lambda node: True)
# Whether the pass has no `inputs` and so runs every edge; reentrant checkpoints require it.
_runs_all = getattr(torch.autograd, "_is_checkpoint_valid", lambda: False)

_known: dict[tuple[bool, ...], int] = {}  # the bits of ctx.needs_input_grad


def _bits(needs):
    return sum(1 << i for i, need in enumerate(needs) if need)


def needed_now(ctx):
    """Return the inputs whose gradients are needed, one bit each.

    These are the inputs of ctx.needs_input_grad whose edge the engine runs. All of them are
    returned if the engine does not report it: while torch.compile traces, under compiled autograd,
    and for a node that is called without the engine. Inputs that are outputs of one node share an
    edge and count together.
    """
    needs = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return _bits(needs)
    if _runs_all() or _running() is not ctx:
        if needs not in _known:  # a few tuples per program
            _known[needs] = _bits(needs)
        return _known[needs]
    bits, needed = 0, [i for i, need in enumerate(needs) if need]
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    for i, node in zip(needed, nodes, strict=True):
        try:
            runs = _will_execute(node)
        except RuntimeError:  # torch raises it for a leaf that is an input of autograd.grad
            runs = True
        bits |= runs << i
    return bits
