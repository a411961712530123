"""Record and replay the experts that models of transformers choose.

`tilemoe.transformers` is the public module. A router of transformers chooses by one torch.topk of K
values over the experts, and computes the scores from its result. While a block runs, a torch
function mode records the indices of that call, or returns given indices with the values at them.
The scores are therefore computed by the model's own code, for every implementation of experts.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .transformers import is_tilemoe

Order = Literal["layers_first", "tokens_first"]

_STATE = "_tilemoe_routing"  # attribute of a block, in its __dict__
_TOP_K = (torch.topk, torch.Tensor.topk)
_LATE = (
    "backward recomputes {name} after replay_routing has ended, so that it could choose "
    "other experts; call backward() inside the context"
)


class record_routing:
    """Record the experts that each MoE layer of a model of transformers chooses.

    A context manager. Every forward inside it, for example the prefill and each step of `generate`,
    appends the ids of its tokens on the device, without a host sync. A recomputation in backward
    (gradient checkpointing) appends nothing. All implementations of experts are supported.

    Args:
        model: A model of transformers, or a part of it.

    Raises:
        ValueError: The model has no layer of experts.

    Example:
        >>> with tilemoe.transformers.record_routing(model) as routing:  # doctest: +SKIP
        ...     tokens = model.generate(prompt, max_new_tokens=32)
        >>> ids = routing.ids(batch_size=len(prompt))  # doctest: +SKIP
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = _layers_of(model)
        self._found: list[list[Tensor]] = [[] for _ in self._layers]

    def __enter__(self) -> "record_routing":
        for layer, found in zip(self._layers, self._found):
            layer.start(recorded=found)
        return self

    def __exit__(self, *error: Any) -> None:
        for layer in self._layers:
            layer.stop()

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in the order of the ids."""
        return [layer.name for layer in self._layers]

    def ids(self, batch_size: int | None = None) -> Tensor | list[Tensor]:
        """Return the recorded ids.

        Args:
            batch_size: Number of sequences in each forward. The ids of a forward are in the order
                of its tokens, (batch, sequence), so those of several forwards of a batch, such as
                the steps of `generate`, are joined along the sequence. None: in the order of the
                forwards.

        Returns:
            ids, int32, shape (layers, tokens, K), or (layers, batch, sequence, K) with batch_size.
            If K differs between layers, a list with the ids of each layer.

        Raises:
            RuntimeError: A layer has not run, or the model was compiled before the context.
        """
        missing = [layer.name for layer, found in zip(self._layers, self._found) if not found]
        if missing:
            raise RuntimeError(_not_used("record_routing", missing))
        joined = [_joined(found, batch_size) for found in self._found]
        if len({of_layer.shape for of_layer in joined}) > 1:
            return joined
        return torch.stack([of_layer.to(joined[0].device) for of_layer in joined])


class replay_routing:
    """Use given experts in each MoE layer of a model of transformers.

    A context manager. Every forward inside it sends token t of layer l to the experts ids[l, t].
    The router computes its logits, and its own code the scores at these ids, so the router has a
    gradient. Replaying the model's own ids does not change any bit. Call backward() inside the
    context, because gradient checkpointing computes the layers again.

    Args:
        model: A model of transformers, or a part of it.
        ids: int8 to int64 or uint8, a tensor or a NumPy array, or a sequence with the ids of each
            layer. A token with only negative ids, such as padding, is not computed by any routed
            expert and gives the router no gradient. If only some ids of a token are negative, its
            scores are NaN.
        order: "layers_first": (layers, tokens, K) or (layers, batch, sequence, K), as returned by
            `record_routing`. "tokens_first": (tokens, layers, K) or (batch, sequence, layers, K),
            as vLLM, SGLang and veRL pass routed experts. `layers` are the layers of experts, or all
            hidden layers of the model, of which those without experts are ignored.

    Raises:
        ValueError: The model has no layer of experts, or ids is wrong; in forward the message names
            the layer.
        NotImplementedError: In forward: a layer does not choose by one torch.topk over its experts.
            The message names the router's class.
        RuntimeError: At the end: a layer has not run, or the model was compiled before the context.
            In backward: the context has ended.

    Example:
        >>> with tilemoe.transformers.replay_routing(model, ids):  # doctest: +SKIP
        ...     model(tokens, labels=tokens).loss.backward()
    """

    def __init__(self, model: torch.nn.Module, ids: Any, *, order: Order = "layers_first") -> None:
        if order not in ("layers_first", "tokens_first"):
            raise ValueError(f"order must be 'layers_first' or 'tokens_first', got {order!r}")
        self._layers = _layers_of(model)
        self._ids = _by_layer(ids, order, self._layers, model)

    def __enter__(self) -> "replay_routing":
        for layer, ids in zip(self._layers, self._ids):
            layer.start(ids=ids)
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        for layer in self._layers:
            layer.stop()
        unused = [layer.name for layer in self._layers if not layer.used]
        if unused and kind is None:
            raise RuntimeError(_not_used("replay_routing", unused))


def _not_used(context: str, names: list[str]) -> str:
    return (
        f"{', '.join(names)} did not run in {context}; call the model inside the context, "
        "and torch.compiler.reset() first if it was compiled before"
    )


def _joined(found: list[Tensor], batch_size: int | None) -> Tensor:
    if batch_size is None:
        return torch.cat(found)
    for of_forward in found:
        if of_forward.shape[0] % batch_size:
            raise ValueError(
                "batch_size must divide the tokens of each forward, got "
                f"batch_size={batch_size} and {of_forward.shape[0]} tokens"
            )
    return torch.cat([t.view(batch_size, -1, t.shape[-1]) for t in found], dim=1)


# ---------------------------------------------------------------- ids of the caller


def _by_layer(ids: Any, order: Order, layers: list["_Layer"], model: Any) -> list[Tensor]:
    """Return the ids (T, K) int64 of each layer."""
    if isinstance(ids, Sequence):
        if len(ids) != len(layers):
            raise ValueError(
                f"ids has {len(ids)} layers, expected {len(layers)}, the layers with experts"
            )
        every = [torch.as_tensor(of_layer) for of_layer in ids]
    else:
        ids = torch.as_tensor(ids)
        if ids.dim() not in (3, 4):
            shape = (
                "(layers, tokens, K) or (layers, batch, sequence, K)"
                if order == "layers_first"
                else "(tokens, layers, K) or (batch, sequence, layers, K)"
            )
            raise ValueError(f"ids has shape {tuple(ids.shape)}, expected {shape}")
        axis = 0 if order == "layers_first" else -2
        every = list(ids.unbind(axis))
        if len(every) != len(layers):
            every = _of_those_with_experts(every, layers, model, tuple(ids.shape), order)
    for layer, of_layer in zip(layers, every):
        if of_layer.dtype.is_floating_point or of_layer.dtype == torch.bool:
            raise ValueError(f"ids must be integers in {layer.name}, got {of_layer.dtype}")
    return [of_layer.reshape(-1, of_layer.shape[-1]).long() for of_layer in every]


def _of_those_with_experts(
    every: list[Tensor], layers: list["_Layer"], model: Any, shape: tuple[int, ...], order: Order
) -> list[Tensor]:
    """Return the ids of the layers with experts, from those of all hidden layers."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    hidden = getattr(text, "num_hidden_layers", None)
    places = [re.search(r"(?:^|\.)(\d+)\.", layer.name + ".") for layer in layers]
    found = [int(place.group(1)) for place in places if place is not None]
    distinct = len(set(found)) == len(layers)
    if len(every) == hidden and distinct and all(place < hidden for place in found):
        return [every[place] for place in found]
    raise ValueError(
        f"ids has shape {shape}, which is {len(every)} layers with order={order!r}, "
        f"expected {len(layers)} layers with experts or {hidden} hidden layers"
    )


# ---------------------------------------------------------------- layers


def _layers_of(model: torch.nn.Module) -> list["_Layer"]:
    modules, found = dict(model.named_modules()), []
    for name, module in modules.items():
        if not (hasattr(module, "is_concatenated") and hasattr(module, "has_gate")):
            continue
        outer = name
        while outer.endswith("base_layer"):  # PEFT's wrappers
            outer = outer.rpartition(".")[0]
        parent, _, own = outer.rpartition(".")
        if own:
            found.append(_layer_of(modules[parent], module, parent or own))
    if not found:
        raise ValueError(
            f"{type(model).__qualname__} has no layer of experts that "
            "transformers.integrations.use_experts_implementation decorates"
        )
    return found


def _layer_of(block: torch.nn.Module, experts: torch.nn.Module, name: str) -> "_Layer":
    """Return the state of a block, always the same object: a compiled graph depends on it."""
    layer = vars(block).get(_STATE)
    if layer is None or layer.experts is not experts:
        layer = vars(block)[_STATE] = _Layer(block, experts)
    layer.name = name
    return layer


class _Layer:
    """Block with a router and experts, whose choice is recorded or given."""

    def __init__(self, block: torch.nn.Module, experts: torch.nn.Module) -> None:
        self.block, self.experts, self.name = block, experts, ""
        self.E = getattr(experts, "num_experts", experts.down_proj.shape[0])
        self.installed: dict[torch.nn.Module, Any] = {}
        self.recorded: list[Tensor] | None = None
        self.ids: Tensor | None = None  # (T, K), at least 0
        self.absent: Tensor | None = None  # (T, K) bool
        self.factor: Tensor | None = None  # (T, 1): NaN if only some ids of the token are absent
        self.used = self.ended = False
        self.found: list[Tensor] = []  # indices of the calls of topk in this forward

    def start(self, recorded: list[Tensor] | None = None, ids: Tensor | None = None) -> None:
        if self.recorded is not None or self.ids is not None:
            raise RuntimeError(f"{self.name} is already in a record_routing or replay_routing")
        self.recorded, self.used, self.ended = recorded, False, False
        if ids is not None:
            self._set(ids.to(self.experts.down_proj.device))
        for module, forward in ((self.block, self.of_block), (self.experts, self.of_experts)):
            if module not in self.installed:
                self.installed[module] = vars(module).get("forward")
                setattr(self, "below_" + forward.__name__, module.forward)
                module.forward = forward

    def _set(self, ids: Tensor) -> None:
        absent = ids < 0
        partial = absent.any(1, keepdim=True) & ~absent.all(1, keepdim=True)
        self.ids, self.absent = ids.clamp(min=0), absent
        self.factor = torch.where(partial, torch.nan, 1.0)

    def stop(self) -> None:
        replayed = self.ids is not None
        self.recorded = self.ids = self.absent = self.factor = None
        self.found = []
        self.ended = replayed
        if not replayed:
            self._remove()

    def _remove(self) -> None:
        for module, forward in self.installed.items():
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward
        self.installed, self.ended = {}, False

    def of_block(self, *args: Any, **named: Any) -> Any:
        """Run the block's forward."""
        if self.recorded is None and self.ids is None:
            if self.ended and not torch.compiler.is_compiling():
                if torch._C._current_graph_task_id() != -1:
                    raise RuntimeError(_LATE.format(name=self.name))
                self._remove()  # with a new forward nothing can be computed again
            return self.below_of_block(*args, **named)  # type: ignore[attr-defined]
        if not self.used and self.ids is not None and _is_in_backward():
            raise RuntimeError(_LATE.format(name=self.name))
        self.found = []
        with _TopK(self):
            return self.below_of_block(*args, **named)  # type: ignore[attr-defined]

    def of_experts(self, hidden_states: Tensor, ids: Tensor, scores: Tensor, *args: Any) -> Any:
        """Run the experts' forward."""
        if self.recorded is not None and not _is_in_backward():
            same = [t for t in self.found if t.shape[-1] == ids.shape[-1]]
            self.recorded.append((same[-1] if same else ids).detach().flatten(0, -2).int())
        if self.ids is not None:
            self._check(ids)
            ids, scores = self._without_absent(ids, scores)
            self.used = True
        below = self.below_of_experts  # type: ignore[attr-defined]
        return below(hidden_states, ids, scores, *args)

    def _check(self, chosen: Tensor) -> None:
        assert self.ids is not None
        K = self.ids.shape[-1]
        if chosen.shape[-1] != K:
            raise ValueError(
                f"ids has {K} experts per token in {self.name}, expected {chosen.shape[-1]}"
            )
        if not self.found or chosen.numel() != self.ids.numel():
            raise NotImplementedError(
                f"{self.name} cannot be replayed, because {self._router()} does not choose "
                f"by one torch.topk of {K} over its experts"
            )

    def _router(self) -> str:
        """Return the class of the router in the block, or the class of a block that chooses."""
        for name, module in self.block.named_children():
            kind = type(module).__qualname__
            if "Router" in kind or name in ("gate", "router"):
                return kind
        return type(self.block).__qualname__

    def _without_absent(self, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        assert self.absent is not None and self.factor is not None
        absent, factor = self.absent.view(ids.shape), self.factor.to(scores.dtype)
        scores = scores.masked_fill(absent, 0.0) * factor.view(*ids.shape[:-1], 1)
        implementation = getattr(self.experts.config, "_experts_implementation", None)
        if is_tilemoe(implementation) and not getattr(self.experts, "_is_expert_parallel", False):
            ids = ids.masked_fill(
                absent, -1
            )  # -1 is skipped; other implementations compute expert 0, with score 0
        return ids, scores

    # ---------------------------------------------------------------- torch.topk

    def top_k(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        values = args[0] if args else named["input"]
        k = args[1] if len(args) > 1 else named["k"]
        dim = args[2] if len(args) > 2 else named.get("dim", -1)
        if dim not in (-1, values.dim() - 1):
            return func(*args, **named)
        if self.ids is None:
            out = func(*args, **named)
            if values.shape[-1] >= self.E:
                self.found.append(out[1])
            return out
        T, K = self.ids.shape
        width, rows = values.shape[-1], values.shape[:-1].numel()
        if width >= self.E and k == K:
            if rows != T:
                raise ValueError(f"ids has {T} tokens in {self.name}, expected {rows}")
            ids = self.ids.view(*values.shape[:-1], K)
            self.found.append(ids)
            return torch.return_types.topk((values.gather(-1, ids), ids))
        if k < width < self.E and rows == T and self.E % width == 0 and values.dim() == 2:
            return self._groups(values, k)
        return func(*args, **named)

    def _groups(self, values: Tensor, k: int) -> Any:
        """Return the k groups of experts with most of a token's ids.

        A router may set the scores of experts in other groups to 0.
        """
        assert self.ids is not None
        of_ids = self.ids // (self.E // values.shape[-1])
        counts = torch.zeros_like(values, dtype=torch.float32)
        counts = counts.scatter_add(1, of_ids, torch.ones_like(of_ids, dtype=torch.float32))
        groups = counts.topk(k, dim=-1)[1]
        return torch.return_types.topk((values.gather(-1, groups), groups))


class _TopK(TorchFunctionMode):
    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _TOP_K:
            return self.layer.top_k(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _is_in_backward() -> bool:
    """Return whether an activation checkpoint computes a forward again."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
