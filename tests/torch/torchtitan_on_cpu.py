"""Makes torchtitan 0.3.0 train on a CPU. To be imported before torchtitan."""

import functools
import types

import torch
import torch._utils
from torch.nn.init import normal_

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan takes its device from it

# Functions of a device module that torchtitan calls. torch.cpu lacks all but the first, whose result,
# "cpu", is no argument of torch.distributed.barrier.
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**30)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None

from torchtitan.models.common.attention import FlexAttention


def attention(
    self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks=None, scale=None, out_transform=None, **_
):
    """In plain torch, causal without a mask; k and v may have fewer heads. FlexAttention has no
    backward on CPUs."""
    q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    logits = (q @ k.mT).float() * (scale or q.shape[-1] ** -0.5)
    b, h, i, j = (torch.arange(size) for size in logits.shape)
    later = i[:, None] < j
    if attention_masks is not None:
        later = ~attention_masks.mask_mod(b[:, None, None, None], h[:, None, None], i[:, None], j)
    logits = logits.masked_fill(later, -torch.inf)
    lse = logits.logsumexp(-1)
    out = ((logits - lse.unsqueeze(-1)).exp().to(v.dtype) @ v).transpose(1, 2)
    return out if out_transform is None else out_transform(out, lse.transpose(1, 2))


FlexAttention.forward = attention


def make_small(configs, flavor):
    """From now on the model `flavor` of torchtitan's `configs` has one layer, so that no rounding
    changes the choice of experts. What its experts add is at first as large as what they add to."""
    full = configs[flavor]

    @functools.wraps(full)
    def small(*args, **options):
        cfg = full(*args, **options)
        cfg.layers = cfg.layers[:1]
        (layer,) = cfg.layers
        experts = layer.moe.routed_experts.inner_experts
        up, down = experts.dim**-0.5, 0.1 * experts.hidden_dim**-0.5
        for name in experts.param_init:
            std = down if name == "w2_EDF" else up
            experts.param_init[name] = functools.partial(normal_, std=std)
        return cfg

    configs[flavor] = small
