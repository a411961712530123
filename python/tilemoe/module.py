"""Define `MoE`: router, routing, experts and shared experts as one torch.nn.Module.

Parameter names and shapes are those of Hugging Face. The parts are in router.py and experts.py.
Symbols are those of docs/mathematics.md: T tokens of width d, E experts of width n, K experts per
token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from . import _calls, _checks, _library, _parameters
from ._autocast import autocast_dtype
from ._kept_codes import gathers_codes
from ._signatures import Reader
from .distributed.dtensor import Spread, is_dtensor, plain
from .experts import ExpertGradients, Experts, LoraRank, SharedExpertGate, SharedExperts, of_experts
from .functional import Gate
from .options import DEFAULTS, OfModule, Options, Rounding
from .quantized_modules import QuantizedWeight
from .recipes import RecipeChoice, choice_of, with_recipe
from .router import Router, RouterKind, is_observed
from .routing import (
    Aux,
    Counter,
    check_token_mask,
    choose,
    router_losses,
    rows_of,
    scores_of,
    shaped_like,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from .distributed.layer import OfTeam
    from .distributed.team import RankTokens, Team

_options = Reader("MoE", OfModule, "K")

_DROPPED_LOSSES = (
    "aux.loss has no gradient: torch.utils.checkpoint with use_reentrant=True "
    "differentiates only the tensors that its function returns, not those in MoEAux; pass "
    "use_reentrant=False, or return aux.loss from the checkpointed function"
)


class MoEAux(NamedTuple):
    """Auxiliary outputs of `MoE.forward`, on the module's device.

    The host does not wait for them. A `MoEAux` is a pytree, like every NamedTuple.

    Attributes:
        loss: float32, shape (): `balance_coefficient * balance + z_coefficient * z`. Add it to the
            task's loss.
        balance: float32, shape (): load balance loss, 1 if balanced; 0 if both coefficients are 0.
        z: float32, shape (): router z loss; 0 if both coefficients are 0.
        expert_counts: int32, shape (E): tokens per expert, before token rounding.
        dropped: int32, shape (): chosen pairs that token rounding removes.
        added: int32, shape (): pairs that token rounding adds.
        without: int32, shape (): tokens without an expert, because of token rounding or given ids.
        overflow: int32, shape (): pairs of all ranks past the capacity of `capacity_factor`, else
            0.
        ids: int32, shape (..., K): chosen or given experts of each token, before token rounding; -1
            for a masked token.
        scores: float32, shape (..., K): scores of `ids`, without gradient; 0 for an absent id.
    """

    loss: Tensor
    balance: Tensor
    z: Tensor
    expert_counts: Tensor
    dropped: Tensor
    added: Tensor
    without: Tensor
    overflow: Tensor
    ids: Tensor
    scores: Tensor


@_options.shows
@_options.attributes
class MoE(nn.Module):
    """Mixture-of-Experts layer: out_t = sum over the K experts of token t of s * expert(x_t).

    The input x has shape (..., d), and so has the output. Each size has two names: a symbol and the
    name that Hugging Face uses; pass one of them.

    Args:
        d: Width of a token, a multiple of 8.
        n: Width inside one expert, a multiple of 8.
        E: Number of experts.
        K: Experts per token.
        hidden_size: Same as d.
        intermediate_size: Same as n.
        num_experts: Same as E.
        top_k: Same as K.
        bias: Add biases to the experts.
        selection_bias: Choose experts by sigmoid + bias; the bias is not part of the score
            (DeepSeek-V3). Requires a sigmoid scoring. See `update_selection_bias`.
        shared_intermediate_size: Width inside the shared experts, an MLP with the experts'
            activation and without biases. All tokens pass through the MLP, and its result is added
            to the routed one. A multiple of 8; for several shared experts the sum of their widths.
            None or 0: no shared experts.
        shared_expert_gate: Scale the shared experts' result by the sigmoid of a linear layer of the
            token (Qwen).
        balance_coefficient: Coefficient of the Switch Transformer's load balance loss in
            `aux.loss`. Both losses are computed if one of the two coefficients is not 0.
        z_coefficient: Coefficient of ST-MoE's router z loss in `aux.loss`.
        fused_decode: In evaluation without gradients, compute up to 64 tokens with one operator
            that includes the router's GEMM; its logits may differ from the linear layer's in the
            last bit. False: always use the linear layer, so that the bits of a token do not depend
            on whether gradients are enabled.
        router_bias: Add a bias to the router's linear layer (gpt-oss).
        router: "linear": compute logits with torch's linear layer. "fixed": compute them with
            `router_logits`, in one order of the sum for every number of tokens, in training and in
            evaluation; `fused_decode` then has no effect.
        router_dtype: Dtype of the router's parameters and logits, for example torch.float32. None:
            the module's dtype.
        lora_rank: Rank of low-rank adapters of the experts' weights, or a pair of ranks for W1 and
            W2, one of which may be 0. The factors `experts.lora_A1` (E, r, d), `experts.lora_B1`
            (E, 2n, r), or (E, n, r) for an activation without a gate, `experts.lora_A2` (E, r, n)
            and `experts.lora_B2` (E, d, r) are float32; A is initialised as in PEFT, B with zeros.
            No other parameter of the layer requires a gradient. With expert_mesh the factors are
            sharded with their experts, and chunks must be 1.
        lora_alpha: Scale the adapters by lora_alpha / r. None: scale by 1.
        expert_mesh: DeviceMesh of one dimension, for example `mesh["ep"]`. The experts are sharded
            over its ranks, and each rank calls the layer with its own tokens. See
            `tilemoe.expert_parallel`.
        rank_tokens: Tokens of each rank of expert_mesh in a call, or their maximum, which must be
            the same number on all ranks. None: all ranks have the same number of tokens. The
            attribute of that name can be set before each call.
        expert_gradients: "mean": the experts' gradients are those of the mean of the ranks'
            objectives, as in data parallel training. "sum": those of the sum, if the caller
            divides.
        return_aux: False: forward returns only the output, as torch.nn.Sequential expects. True:
            forward returns the output and a `MoEAux`. The loss coefficients require True.
        device: Device of the parameters.
        dtype: Dtype of the parameters. Required on a GPU if the default dtype is float32:
            torch.bfloat16 or torch.float16, or torch.float32 for parameters that FSDP's mixed
            precision or torch.autocast casts.
        **options: Options of the layer by name; see `tilemoe.options.Options`.

    Raises:
        ValueError: A size or an option is invalid, float32 parameters on a GPU have no explicit
            dtype, or a loss coefficient is given without return_aux=True.
        TypeError: A size is missing, is given twice or is not an int.

    Example:
        >>> layer = tilemoe.MoE(
        ...     hidden_size=64, intermediate_size=32, num_experts=8, top_k=2
        ... )
        >>> layer(torch.randn(3, 5, 64)).shape
        torch.Size([3, 5, 64])
    """

    def __init__(
        self,
        d: int | None = None,
        n: int | None = None,
        E: int | None = None,
        K: int | None = None,
        *,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_experts: int | None = None,
        top_k: int | None = None,
        bias: bool = False,
        selection_bias: bool = False,
        shared_intermediate_size: int | None = None,
        shared_expert_gate: bool = False,
        balance_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        fused_decode: bool = True,
        router_bias: bool = False,
        router: RouterKind = "linear",
        router_dtype: torch.dtype | None = None,
        lora_rank: LoraRank = None,
        lora_alpha: float | None = None,
        expert_mesh: DeviceMesh | None = None,
        rank_tokens: RankTokens = None,
        expert_gradients: ExpertGradients = "mean",
        return_aux: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[OfModule],
    ) -> None:
        super().__init__()
        d = _parameters.size_of("d", d, "hidden_size", hidden_size)
        n = _parameters.size_of("n", n, "intermediate_size", intermediate_size)
        E = _parameters.size_of("E", E, "num_experts", num_experts)
        K = _parameters.size_of("K", K, "top_k", top_k)
        _parameters.check_sizes(d, n, E, K, shared_intermediate_size)
        _parameters.check_dtypes(dtype=dtype, router_dtype=router_dtype)
        _parameters.check_default_dtype(device, dtype)
        self.options = _options({"K": K, **options})
        _checks.groups(self.options, E, K)
        if selection_bias:
            _parameters.check_selection_bias(self.options.scoring)
        if shared_expert_gate and not shared_intermediate_size:
            raise ValueError("shared_expert_gate=True requires shared_intermediate_size")
        _parameters.check_losses(return_aux, balance_coefficient, z_coefficient)
        self.d, self.n, self.E = d, n, E
        self.balance_coefficient, self.z_coefficient = balance_coefficient, z_coefficient
        self.return_aux = return_aux
        self.router_dtype = router_dtype  # a wrapper of the gate may hide its attributes
        self.fused_decode = fused_decode
        self.recipe_choice: RecipeChoice | None = None  # of the last call with recipe="auto"
        self._ran_without_gradients = False  # since the last forward with gradients
        self.expert_mesh, self.rank_tokens = expert_mesh, rank_tokens
        self.gate = Router(
            d,
            E,
            bias=router_bias,
            selection_bias=selection_bias,
            kind=router,
            dtype=router_dtype,
            module_dtype=dtype,
            device=device,
        )
        form = of_experts.part_of(self.options)
        self.experts = Experts(
            d, n, E, bias=bias, lora_rank=lora_rank, lora_alpha=lora_alpha, **form,
            expert_mesh=expert_mesh, expert_gradients=expert_gradients, device=device, dtype=dtype,
        )  # fmt: skip
        self.shared_experts: SharedExperts | None = None
        self.shared_expert_gate: SharedExpertGate | None = None
        if shared_intermediate_size:
            self.shared_experts = SharedExperts(
                d, shared_intermediate_size, **form, device=device, dtype=dtype
            )
        if shared_expert_gate:
            self.shared_expert_gate = SharedExpertGate(1, d, device=device, dtype=dtype)
        self.reset_parameters()
        if lora_rank is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.startswith("experts.lora_"))

    def reset_parameters(self) -> None:
        """Reset all parameters.

        Weights are uniform in +-1/sqrt(fan-in), as in torch.nn.Linear; biases are zero.
        """
        for part in self.children():
            part.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,
        seed: Counter | None = None,
        offset: Counter | None = None,
        *,
        ids: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, MoEAux]:
        """Route the tokens of x and compute their experts.

        Args:
            x: Tokens, shape (..., d), in the parameters' dtype or in autocast's.
            seed: Seed of stochastic rounding, an int or an int64 tensor of one element. Required in
                training with rounding="stochastic".
            offset: Offset of stochastic rounding, like seed. The same two values give the same
                rounding: increase offset by one in each step.
            ids: Experts of each token, int32 or int64, shape (..., K), if they were chosen
                elsewhere, for example in a rollout. An id outside [0, E), such as -1, is skipped.
                The scores are those of `scoring` for the gate's logits at these ids, so gradients
                reach the gate. The layer then chooses no experts, and the counts of `MoEAux` are
                those of ids.
            token_mask: bool, shape (...), False for padding: no routed expert computes such a
                token, its routed output is 0, and neither the losses nor `MoEAux` count it. With
                expert_mesh either all ranks pass a mask or none does.

        Returns:
            The output, shape (..., d); with return_aux=True in the constructor, the output and a
            `MoEAux`.

        Raises:
            ValueError: The shape or dtype of x, ids or token_mask is wrong, stochastic rounding
                lacks seed or offset, or ids or token_mask is given while rounding is active (in
                training with the option `rounding`).
        """
        _library.require_device(x, "x")
        cast = autocast_dtype(x.device)
        if cast is None:
            _library.require_dtype(x)
        if x.dim() == 0 or x.shape[-1] != self.d:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., {self.d})")
        if self.training and not self.return_aux:  # the attribute can be set after the constructor
            _parameters.check_losses(False, self.balance_coefficient, self.z_coefficient)
        rounding = self.options.rounding if self.training else None
        if rounding != "stochastic":
            seed = offset = None
        elif seed is None or offset is None:
            raise ValueError("seed and offset are required in training with rounding='stochastic'")

        if self.expert_mesh is not None and self.expert_mesh.size() > 1:
            return self._on_mesh(x, rounding, seed, offset, ids, token_mask)
        spread: Spread | None = None
        local = x
        if type(x) not in _library.PLAIN and is_dtensor(x):
            spread, local = Spread(x), x.to_local()
        mask = None
        if token_mask is not None:
            mask = self._rows_of_mask(token_mask, x, spread, rounding)
        options = self._options_of(local)
        plain, found, tokens = spread is None and ids is None and mask is None, None, local
        # Its node reads x (..., d) itself. Shared experts would need a view, also a node.
        whole = plain and torch.is_grad_enabled() and local.is_contiguous()
        whole = whole and self._modules.get("shared_experts") is None
        if whole:
            found = self._with_router(local, rounding, cast, options)
        if found is None:
            tokens = rows_of(local, "x", "(..., d)")  # (T, d)
            # In a reentrant checkpoint x requires a gradient although gradients are off.
            decodes = plain and not x.requires_grad and options.recipe == "bf16"
            gate = self._gate_of_decode(tokens) if decodes else None
            own = tokens if gate is not None else self._cast(tokens)
            if gate is not None:
                found = self._decode(tokens, gate, options)
            elif plain and not whole:
                found = self._with_router(own, rounding, cast, options)
        if found is not None:
            out, aux, logits = found
        else:
            logits = self.gate(tokens if self.router_dtype else own, spread)  # (T, E)
            router, how = self._routing(logits, ids, mask, rounding, x, spread)
            found = self.experts(
                own,
                router,
                spread,
                options=options,
                seed=seed,
                offset=offset,
                addend=self._shared(own, spread),
                return_aux=self.return_aux,
                **how,
            )
            out, aux = found if self.return_aux else (found, None)
        out = shaped_like(out, local)
        if spread is not None:
            out = spread.output(out)
        if aux is None:
            return out
        assert logits is not None
        losses = self._losses(logits, aux.expert_counts, mask)
        counts, choice = self._counts(aux, mask), self._choice(aux, mask, local)
        if spread is None:
            return out, MoEAux(*losses, *counts, *choice)
        losses, counts = map(spread.mean, losses), map(spread.total, counts)
        return out, MoEAux(*losses, *counts, *map(spread.output, choice))

    def _on_mesh(
        self,
        x: Tensor,
        rounding: Rounding | None,
        seed: Counter | None,
        offset: Counter | None,
        ids: Tensor | None,
        token_mask: Tensor | None,
    ) -> Tensor | tuple[Tensor, MoEAux]:
        """Run forward with this rank's tokens and with experts on several ranks."""
        from .distributed import layer

        assert self.expert_mesh is not None
        if is_dtensor(x):
            raise ValueError(
                "x must be a plain tensor with expert_mesh, got a DTensor; pass the "
                "rank's own tokens, x.to_local()"
            )
        mask = self._rows_of_mask(token_mask, x, None, rounding)
        own = self._cast(x.reshape(-1, self.d))  # (t, d)
        sizes = self.d, self.n, self.E, self.K
        group = self.expert_mesh.get_group()
        team = layer.team_of(
            group, own, self.options, self.rank_tokens, sizes, rounding is not None
        )
        arrival = None if rounding is not None else layer.start(own, team)
        # Overlap the transfer of the rows with the router:
        logits = self.gate(x.reshape(-1, self.d) if self.router_dtype else own)  # (t, E)
        router, how = self._routing(logits, ids, mask, rounding, x, None)
        out, aux, of_team = self.experts(
            own,
            router,
            options=self._options_of(own),
            seed=seed,
            offset=offset,
            addend=self._shared(own, None),
            team=team,
            arrival=arrival,
            **how,
        )
        out = shaped_like(out, x)
        if not self.return_aux:
            return out
        losses = self._losses_of_team(logits, of_team, team, mask)
        counts, choice = self._counts(aux, mask), self._choice(aux, mask, x)
        return out, MoEAux(*losses, *counts, *choice)

    def _losses_of_team(
        self, logits: Tensor, of_team: OfTeam, team: Team, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute loss, balance and z of all ranks from own logits (t, E) and mask (t)."""
        from .distributed.team import mean_of_ranks

        loss, balance, z = self._losses(logits, of_team.counts, mask)
        if not self._has_losses():
            return loss, balance, z
        # Weight each rank's mean by its number of tokens.
        if mask is None:
            share = team.t * team.size / of_team.tokens.clamp(min=1).float()
        else:
            own = mask.sum().float()
            share = own / mean_of_ranks(own, team).clamp(min=1 / team.size)
        balance, z = (mean_of_ranks(torch.where(share > 0, of * share, 0.0), team)
                      for of in (balance, z))  # fmt: skip
        return self.balance_coefficient * balance + self.z_coefficient * z, balance, z

    def quantize_weights(self) -> None:
        """Make the FP8 codes of the experts' weights; see `tilemoe.quantize_weights`."""
        self.experts.quantize_weights()

    def _options_of(self, tokens: Tensor) -> Options:
        """Return the options with the recipe of a call with tokens (..., d)."""
        if self.options.recipe != "auto":
            return self.options
        dtype = autocast_dtype(tokens.device) or tokens.dtype
        like = torch.empty(0, dtype=dtype, device=tokens.device)
        weight = self.experts.down_proj
        if isinstance(weight, QuantizedWeight):
            weight = weight.value()
        elif gathers_codes(weight):
            self.recipe_choice = RecipeChoice("fp8", "fully_shard gathers FP8 codes")
            return with_recipe(self.options, "fp8")
        sizes, T = tuple(weight.shape), tokens.numel() // self.d
        if self.expert_mesh is not None:
            sizes = sizes[0] // self.expert_mesh.size(), *sizes[1:]
        self.recipe_choice = choice_of(like, T, T * self.K, sizes, self.options, weight.dtype)
        return with_recipe(self.options, self.recipe_choice.recipe)

    def _cast(self, tokens: Tensor) -> Tensor:
        """Cast the tokens to autocast's dtype once if the layer has shared experts.

        Without this cast, shared and routed experts would each save a copy.
        """
        if self.shared_experts is None:
            return tokens
        dtype = autocast_dtype(tokens.device)
        return tokens if dtype is None else tokens.to(dtype)

    def _gate_of_decode(self, tokens: Tensor) -> Gate | None:
        """Return the router for `moe_tokens` if inference supports tokens (T, d), else None."""
        # In training, an activation checkpoint runs forward without gradients and again with
        # them, and both runs must have the same bits.
        if self.training or torch.is_grad_enabled() or autocast_dtype(tokens.device) is not None:
            return None
        if not self.fused_decode:
            return None
        if torch.compiler.is_exporting():
            return None  # the graph must be valid for any number of tokens
        if type(self.gate) is not Router or type(self.experts) is not Experts:
            return None  # replaced by another module
        if self.experts.lora_scale is not None:
            return None  # moe_tokens does not support adapters
        if self.experts.is_quantized:
            return None  # or quantised weights
        return None if is_observed(self.experts) else self.gate.of_decode(tokens, self.K)

    def _decode(
        self, tokens: Tensor, gate: Gate, options: Options | None = None
    ) -> tuple[Tensor, Aux | None, Tensor]:
        """Compute tokens (T, d) -> out (T, d), Aux if return_aux, logits (T, E) if needed."""
        return self.experts.of_decode(
            tokens,
            gate,
            options or self.options,
            selection_bias=self._selection_bias(),
            addend=self._shared(tokens, None),
            wants_logits=self._has_losses(),
            return_aux=self.return_aux,
        )

    def _with_router(
        self, x: Tensor, rounding: Rounding | None, cast: torch.dtype | None, options: Options
    ) -> tuple[Tensor, Aux | None, Tensor | None] | None:
        """Compute x (..., d) -> out (..., d), Aux and logits if return_aux, in one autograd node.

        Return None if the result would differ from calling the modules, or if no operator computes
        both: the gate or the experts were replaced, wrapped or have hooks. `cast` is the dtype of
        autocast.
        """
        parts = self._modules  # nn.Module's lookup begins with an exception
        gate, experts = parts.get("gate"), parts.get("experts")
        if type(gate) is not Router or type(experts) is not Experts:
            return None
        if rounding is not None or is_observed(experts):
            return None
        found, layer = gate.as_linear(x), experts.plain_layer(options)
        if found is None or layer is None:
            return None
        router, bias = found
        own, router = _calls.cast_router(x, router, cast)
        if not _calls.in_one_node(own, router, layer, rounds=False):
            return None
        addend = self._shared(x, None)
        return _calls.with_router(
            own, router, layer, cast=cast, selection_bias=bias, addend=addend,
            return_aux=self.return_aux,
        )  # fmt: skip

    def _selection_bias(self) -> Tensor | None:
        """Return the selection bias of the gate, or of the gate inside a wrapper."""
        if isinstance(self.gate, Router):
            return self.gate.e_score_correction_bias
        for module in self.gate.modules():  # the gate itself first
            if hasattr(module, "e_score_correction_bias"):
                return module.e_score_correction_bias
        return None

    def _routing(
        self,
        logits: Tensor,
        ids: Tensor | None,
        mask: Tensor | None,
        rounding: Rounding | None,
        x: Tensor,
        spread: Spread | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the router input of the experts and the keywords of their call.

        The router input is logits (T, E), or scores (T, K) if ids or a mask are given.
        """
        if ids is None and mask is None:
            return logits, dict(selection_bias=self._selection_bias(), rounds=rounding is not None)
        if ids is None:
            scores, ids, _ = choose(logits, self.options, self._selection_bias())
        else:
            ids = self._rows_of_ids(ids, x, spread)
            if rounding is not None:
                raise ValueError(
                    f"ids must be None in training with rounding={rounding!r}, which "
                    "chooses other pairs; use rounding=None or call eval()"
                )
            scores = None
        if mask is not None:
            ids = ids.masked_fill(~mask.unsqueeze(-1), -1)
        return scores_of(logits, ids, self.options) if scores is None else scores, dict(ids=ids)

    def _rows_of_mask(
        self, mask: Tensor | None, x: Tensor, spread: Spread | None, rounding: Rounding | None
    ) -> Tensor | None:
        """Return token_mask (...) as this rank's (T)."""
        if mask is None:
            return None
        check_token_mask(mask, x, "x")
        if rounding is not None:
            raise ValueError(
                f"token_mask must be None in training with rounding={rounding!r}, which "
                "rounds all tokens; use rounding=None or remove the padding from x"
            )
        if spread is not None:
            mask = spread.local_like_x("token_mask", mask)
        return plain("token_mask", mask).reshape(-1)

    @staticmethod
    def _counts(aux: Aux, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the fields of MoEAux that count, from a routing's Aux."""
        without = aux.without
        if mask is not None:
            without = without - (~mask).sum(dtype=torch.int32)
        return aux.expert_counts, aux.dropped, aux.added, without, aux.overflow

    @staticmethod
    def _choice(aux: Aux, mask: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and scores (..., K) of an Aux; masked tokens have score 0."""
        scores = aux.scores
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(-1), 0.0)
        return shaped_like(aux.ids, like), shaped_like(scores, like)

    def _rows_of_ids(self, ids: Tensor, x: Tensor, spread: Spread | None) -> Tensor:
        """Return ids (..., K) as this rank's (T, K)."""
        _library.require_together(x, "x", ids=ids)
        if ids.shape != (*x.shape[:-1], self.K):
            expected = (*x.shape[:-1], self.K)
            raise ValueError(f"ids has shape {tuple(ids.shape)}, expected {expected}")
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"ids must be int32 or int64, got {ids.dtype} with shape {tuple(ids.shape)}"
            )
        if spread is not None:
            ids = spread.local_like_x("ids", ids)
        return plain("ids", ids).reshape(-1, self.K)

    def _shared(self, tokens: Tensor, spread: Spread | None) -> Tensor | None:
        """Compute the shared experts of tokens (T, d) -> (T, d)."""
        shared_experts = self.shared_experts
        if shared_experts is None:
            return None
        gate = self.shared_expert_gate
        return shared_experts(
            tokens,
            None if gate is None else gate(tokens, spread),
            spread,
            column_blocks=self.options.column_blocks,
            overwrite_H=self.options.overwrite_H,
        )

    def _has_losses(self) -> bool:
        return self.balance_coefficient != 0 or self.z_coefficient != 0

    def _losses(
        self, logits: Tensor, expert_counts: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute loss, balance and z from logits (T, E), expert_counts (E) and mask (T)."""
        if not self._has_losses():
            loss, balance, z = torch.zeros(3, device=logits.device).unbind()
            return loss, balance, z
        balance, z = router_losses(logits, expert_counts, mask)
        if self.training and not torch.compiler.is_compiling():
            self._watch(balance, z)
        return self.balance_coefficient * balance + self.z_coefficient * z, balance, z

    def _watch(self, *losses: Tensor) -> None:
        """Make backward fail if a reentrant activation checkpoint drops the losses.

        Such a checkpoint differentiates the tensors of its function's flat outputs, but aux is a
        tuple inside them. Its forward runs without gradients, and its backward runs forward with
        gradients.
        """
        if not torch.is_grad_enabled():
            self._ran_without_gradients = True
            return
        recomputes, self._ran_without_gradients = self._ran_without_gradients, False
        recomputes = recomputes and torch._C._current_graph_task_id() != -1
        if not recomputes or not losses[0].requires_grad:
            return
        gradients: list[Tensor] = []
        for loss in losses:
            loss.register_hook(gradients.append)

        def check() -> None:
            if not gradients:
                raise RuntimeError(_DROPPED_LOSSES)

        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(check)

    @torch.no_grad()
    def update_selection_bias(self, expert_counts: Tensor, rate: float = 1e-3) -> None:
        """Balance the load without a loss: bias += rate * sign(mean(c) - c).

        An expert with less than the mean load is then chosen more often, as in DeepSeek-V3 (arXiv
        2408.15664, algorithm 1; arXiv 2412.19437, section 2.1.2, with rate 1e-3). Call this method
        once after each optimizer step.

        Args:
            expert_counts: `aux.expert_counts` of one step, shape (E), summed over its micro-batches
                and, in data parallel training, over the ranks (all_reduce), so that all ranks keep
                the same bias.
            rate: Step of the bias.

        Raises:
            ValueError: The module has no selection bias, or expert_counts has a wrong shape.
        """
        bias = self._selection_bias()
        if bias is None:
            raise ValueError("update_selection_bias requires a module with selection_bias=True")
        if expert_counts.shape != bias.shape:
            raise ValueError(
                f"expert_counts has shape {tuple(expert_counts.shape)}, expected ({self.E},)"
            )
        counts = expert_counts.to(bias)
        bias.add_(torch.sign(counts.mean() - counts), alpha=rate)

    def extra_repr(self) -> str:
        options = self.options
        shown = {"K": options.K, "scoring": options.scoring}
        if options.rounding is not None:
            shown |= {"rounding": options.rounding, "m": options.m}
        for name in (
            "rounding_tokens", "n_group", "topk_group", "group_score", "routed_scaling_factor",
        ):  # fmt: skip
            if getattr(options, name) != DEFAULTS[name]:
                shown[name] = getattr(options, name)
        for name in ("balance_coefficient", "z_coefficient"):
            if getattr(self, name) != 0:
                shown[name] = getattr(self, name)
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())
