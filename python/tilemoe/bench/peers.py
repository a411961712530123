"""Define the implementations that are compared, each a whole layer with its router.

The activation has a gate; the scores are top-K by softmax over the chosen experts. A peer is made
from a Problem and keeps it; its W1 may have another order of rows. A peer that cannot run returns
the reason and the fix.
"""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import io
import os
import pathlib
import re

import torch
import torch.nn.functional as F

from .problem import ACTIVATIONS, DTYPES, glu


class Peer:
    name = ""
    packages = ("torch",)  # packages whose versions are recorded with the numbers
    install = ""  # command that installs it
    module = None  # module that it imports
    only_if_named = False  # True: does not run by default
    takes_adapters = False
    is_layer = True  # False: a reference without a formula to check, whose memory is not measured
    tolerance = 0.0  # of its errors, if it computes with fewer bits than the dtype

    @classmethod
    def variables(cls, environment):
        """Return the variables of its process, in addition to the environment."""
        return {}

    @classmethod
    def missing(cls, case):
        """Return why it cannot run this case, or None."""
        if cls.module is not None and importlib.util.find_spec(cls.module) is None:
            return f"not installed: {cls.install}"
        if case.rounding is not None:
            return "token rounding is not supported"
        if case.biases:
            return "biases are not compared"
        if case.lora_rank and not cls.takes_adapters:
            return "adapters are not compared"
        return None

    @staticmethod
    def case_of(case):
        """Return the case that it runs for a given one."""
        return case

    @staticmethod
    def working_bytes(case):
        """Estimate its memory in addition to weights, gradients and tokens.

        The memory has copies of the gathered rows and of H.
        """
        return 3 * case.rows * (case.d + 3 * case.n) * DTYPES[case.dtype].itemsize

    def __init__(self, problem):
        self.problem = problem
        order = self.rows_of_W1(problem.case.n)
        self.order = order if order is None else order.to(problem.X.device)
        W1 = problem.W1
        if order is not None:
            trained = W1.requires_grad
            W1 = W1.detach()[:, self.order].contiguous().requires_grad_(trained)
        self.X, self.router, self.W1, self.W2 = problem.X, problem.router, W1, problem.W2

    @staticmethod
    def rows_of_W1(n):
        """Return (2n): for each row of the peer's W1, the row of the problem's.

        The problem's gate rows come first. None if both are equal.
        """
        return None

    def forward(self):
        """Return O (T, d)."""
        raise NotImplementedError

    def infer(self):
        """Return O (T, d), without gradients, as a model in evaluation calls it."""
        return self.forward()

    def backward(self, O):
        """Return the gradients of the problem's leaves, weights in the peer's layout."""
        leaves = [self.X, *self.problem.adapters]
        if not self.problem.case.frozen:
            leaves += [self.router, self.W1, self.W2, *self.problem.biases]
        return torch.autograd.grad(O, leaves, self.problem.dO)

    def resident_bytes(self):
        """Return the bytes of the caller's tensors."""
        return self.problem.resident_bytes()

    def given_layout(self, dW1):
        """Return dW1 with the problem's order of rows."""
        if self.order is None:
            return dW1
        given = torch.empty_like(dW1)
        given[:, self.order] = dW1
        return given

    def top_k(self):
        """Return scores (T, K) of X's dtype and ids (T, K), as PyTorch users write them."""
        top, ids = self.problem.logits().float().topk(self.problem.K, dim=-1)
        return top.softmax(dim=-1).to(self.X.dtype), ids

    def wrong_kernels(self, names=()):
        """Return why it ran other kernels than its name implies, or None.

        names: the kernels that ran, if they are known.
        """
        return None


class TileMoE(Peer):
    """tilemoe.moe after the router's GEMM; worker.py sets the options of the command line."""

    name = "tilemoe"
    packages = ("torch", "tilemoe")
    takes_adapters = True
    options = {}

    @classmethod
    def missing(cls, case):
        if importlib.util.find_spec("tilemoe") is None:
            return "not installed: pip install . in its source tree"
        if case.device == "cuda" and case.dtype == "float32":
            return "only bfloat16 and float16 are supported on a GPU"
        if cls.calls_gemms(case) and (case.rounding is not None or case.lora_rank):
            return "gathered_mm and combine_mm are compared without token rounding and adapters"
        return None

    @staticmethod
    def calls_gemms(case):
        """Return whether it calls gathered_mm and combine_mm with a compiled activation."""
        return case.activation == "mishglu"

    def __init__(self, problem):
        super().__init__(problem)
        import tilemoe

        arch = os.environ.get("TILEMOE_ARCH", "auto")
        self.moe, self.arch = tilemoe.moe, None if arch == "auto" else arch
        if self.arch and self.X.is_cuda:
            with contextlib.redirect_stdout(io.StringIO()) as text:
                tilemoe.show_config()
            if not re.search(rf": {self.arch}\b", text.getvalue()):
                raise RuntimeError(
                    f"this TileMoE does not support the arch {self.arch} on this GPU"
                )

    def gemms(self):
        import tilemoe

        from . import compiled

        p = self.problem
        b1, b2 = p.biases or (None, None)
        routing = tilemoe.route(p.logits(), p.K)
        H = tilemoe.gathered_mm(p.X, p.W1, routing, bias=b1)  # (M, 2n)
        A = compiled.glu(H, None, p.case.activation)  # (M, n)
        return tilemoe.combine_mm(A, p.W2, routing, bias=b2)

    def forward(self):
        p = self.problem
        if self.calls_gemms(p.case):
            return self.gemms()
        biases = dict(zip(("b1", "b2"), p.biases))
        if p.adapters:
            import tilemoe

            biases["lora"] = tilemoe.LoRA(*p.adapters, scale=p.LORA_SCALE)
        return self.moe(p.X, p.logits(), *self.weights(), K=p.K, rounding=p.rounding,
                        activation=p.case.activation, **biases, **self.options)  # fmt: skip

    def weights(self):
        return self.problem.W1, self.problem.W2

    @functools.cached_property
    def as_module(self):
        import tilemoe

        case = self.problem.case
        module = tilemoe.MoE(
            case.d, case.n, case.E, case.K, return_aux=False, device="meta", dtype=self.X.dtype,
            activation=case.activation, **self.options,
        ).eval()  # fmt: skip
        weights = {"gate.weight": self.router, "experts.gate_up_proj": self.W1,
                   "experts.down_proj": self.W2}  # fmt: skip
        module.load_state_dict(weights, assign=True)
        return module

    def infer(self):
        """Compute with tilemoe.MoE, which uses moe_tokens for small T.

        The functions are called if the module does not support the case.
        """
        case = self.problem.case
        if (case.zipf or case.biases or case.rounding or case.lora_rank
                or self.calls_gemms(case)):  # fmt: skip
            return self.forward()
        return self.as_module(self.X.detach())  # moe_tokens refuses an x that requires a gradient

    def wrong_kernels(self, names=()):
        ours = " ".join(name for name in names if "tilemoe::" in name)
        ran = {arch.lower() for arch in re.findall(r"\b[Ss]m(?:80|90|100)\b", ours)}
        if self.arch and names and ran != {self.arch}:
            return f"kernels of {' and '.join(sorted(ran)) or 'no arch'} ran"
        return None


def _variant(name, of=TileMoE, **attributes):
    return type(of.__name__, (of,), {"name": name, "only_if_named": True, **attributes})


TileMoEKeeping = _variant("tilemoe-keeps-h", options={"overwrite_H": False})
TileMoEOverwriting = _variant("tilemoe-dh-over-h", options={"overwrite_H": True})
TileMoESmall = _variant("tilemoe-small-peak", options={"overwrite_H": True, "column_blocks": 4})
TileMoEBefore = _variant("tilemoe-before")  # another build, in the folder of --packages


class TileMoEGatheredMM(TileMoE):
    """The two GEMMs as separate functions, also for activations of the library."""

    name = "tilemoe-gathered-mm"
    only_if_named = True

    @staticmethod
    def calls_gemms(case):
        return True


class TileMoEFrozen(TileMoE):
    """The layer with frozen weights and without adapters, for comparison with adapters."""

    name = "tilemoe-frozen"
    only_if_named = True

    @staticmethod
    def case_of(case):
        return dataclasses.replace(case, frozen=True, lora_rank=0)


class TileMoEQuantized(TileMoE):
    """The layer with quantised weights, whose values the problem's weights have.

    The router's choice and the 16-bit layer are therefore comparable with `tilemoe`, in a separate
    process.
    """

    name = "tilemoe-nf4"
    only_if_named = True
    format = "nf4"

    @classmethod
    def missing(cls, case):
        frozen = None if case.frozen else "quantised weights require --frozen or --lora-rank"
        return super().missing(case) or frozen

    def __init__(self, problem):
        super().__init__(problem)
        import tilemoe

        self.narrow = []
        for weight in (problem.W1, problem.W2):
            narrow = tilemoe.quantize_experts(weight, self.format)
            weight.data.copy_(narrow.dequantize())
            self.narrow.append(narrow)

    def weights(self):
        return self.narrow

    def infer(self):
        return self.forward()

    def resident_bytes(self):
        narrow, wide = self.narrow, (self.W1, self.W2)
        return super().resident_bytes() + sum(n.nbytes - w.nbytes for n, w in zip(narrow, wide))


_QUANTIZED = [
    _variant(f"tilemoe-{format.replace('_', '-')}", TileMoEQuantized, format=format)
    for format in ("fp8", "mxfp4", "nf4", "nf4_double", "nvfp4")
]


class TileMoERecipe(TileMoE):
    """The layer with a recipe of FP8, whose weights are quantised before it is timed.

    The problem's weights have the values of the codes.
    """

    name = "tilemoe-recipe-fp8"
    only_if_named = True
    recipe = "fp8"
    save_h = None
    tolerance = 7e-2  # measured 3.0 to 5.3 %

    @classmethod
    def missing(cls, case):
        if case.lora_rank and cls.recipe == "fp8":
            return "recipe fp8 does not support adapters, fp8_forward does"
        if case.n % _SCALES and (case.biases or case.lora_rank):
            return f"biases and adapters require n to be a multiple of {_SCALES}"
        if case.d % _CODES or case.n % _CODES:
            return f"d and n must be multiples of {_CODES}"
        return super().missing(case)

    @staticmethod
    def working_bytes(case):
        return Peer.working_bytes(case) + 9 * case.E * case.d * case.n  # codes, gate and up apart

    def __init__(self, problem):
        super().__init__(problem)
        n, masters = problem.case.n, [problem.W1]
        if n % _SCALES:  # gate and up share no scales: they are two tensors
            masters = [W1.detach().contiguous() for W1 in problem.W1.split(n, dim=1)]
        for master in masters:
            master.requires_grad_(problem.W1.requires_grad)
        self.masters = masters
        self.options = {**self.options, "recipe": self.recipe, "save_h": self.save_h}
        self.quantize()
        with torch.no_grad():
            for W, codes in zip((*masters, problem.W2), self.codes):
                W.copy_(codes.weight.dequantize())
            if len(masters) > 1:
                problem.W1.copy_(torch.cat(masters, 1))

    def quantize(self):
        import tilemoe

        backward = self.recipe == "fp8"
        masters = (*self.masters, self.problem.W2)
        self.codes = [tilemoe.fp8_weight(W, transposed=backward) for W in masters]
        if len(masters) > 2:
            self.options |= {"W1_up": self.codes[1], "gate_layout": "split"}

    def weights(self):
        return self.codes[0], self.codes[-1]

    def infer(self):
        return self.forward()

    def backward(self, O):
        p = self.problem
        leaves = [self.X, *p.adapters]
        if not p.case.frozen:
            leaves += [self.router, *self.masters, self.W2, *p.biases]
        found = torch.autograd.grad(O, leaves, p.dO)
        if p.case.frozen or len(self.masters) == 1:
            return found
        return *found[:2], found[2:4], *found[4:]  # dW1 is a pair: nothing is copied

    def given_layout(self, dW1):
        return dW1 if torch.is_tensor(dW1) else torch.cat(dW1, 1)

    def resident_bytes(self):
        return super().resident_bytes() + sum(codes.nbytes for codes in self.codes)


_SCALES, _CODES = 128, 16  # columns with one scale, and of 16 bytes, in the recipes of FP8
TileMoERecipeForward = _variant("tilemoe-recipe-fp8-forward", TileMoERecipe, recipe="fp8_forward")
TileMoERecipeSaveH = _variant(
    "tilemoe-recipe-fp8-save-h", TileMoERecipe, save_h="fp8", tolerance=9e-2
)


class TileMoERecipeEach(TileMoERecipe):
    """The same with one quantisation of the weights per pass."""

    name = "tilemoe-recipe-fp8-each"

    def forward(self):
        self.quantize()
        return super().forward()


RECIPES = {
    "fp8": TileMoERecipe,
    "fp8_each": TileMoERecipeEach,
    "fp8_forward": TileMoERecipeForward,
    "fp8_save_h": TileMoERecipeSaveH,
}


class TileMoESm80(TileMoE):
    """The GEMMs by mma.sync, on any GPU."""

    name = "tilemoe-sm80"
    only_if_named = True
    forced = "sm80"

    @classmethod
    def variables(cls, environment):
        return arch_variables(cls.forced)

    @classmethod
    def missing(cls, case):
        return super().missing(case) or (None if case.device == "cuda" else "a GPU is required")


TileMoESm90 = _variant("tilemoe-sm90", TileMoESm80, forced="sm90")  # by wgmma


def arch_variables(arch):
    """Return the arch by the current name of the variable and by the name of older builds."""
    return {"TILEMOE_ARCH": arch, "TILEMOE_KIT": arch}


class TorchDense(Peer):
    """GEMMs of the experts as dense GEMMs of the same M, N and K, each one torch.mm.

    One expert's weights multiply the rows of all pairs, without router, gather, activation or
    combine.
    """

    name = "torch-dense"
    only_if_named = True
    is_layer = False

    def __init__(self, problem):
        super().__init__(problem)
        case = problem.case
        # Rows of X and of dO for each pair, as gathered.
        pairs = torch.arange(case.rows, device=self.X.device) // case.K
        with torch.no_grad():
            self.rows, self.d_rows = self.X[pairs], problem.dO[pairs]  # (M, d)
            self.H = self.rows @ self.W1[0].t()  # (M, 2n)
            self.A = glu(self.H, case.activation)  # (M, n)

    @torch.no_grad()
    def forward(self):
        self.H = self.rows @ self.W1[0].t()
        return self.A @ self.W2[0].t()  # Y (M, d)

    @torch.no_grad()
    def backward(self, O):
        dA = self.d_rows @ self.W2[0]  # (M, n)
        dW2 = self.d_rows.t() @ self.A  # (d, n)
        d_rows = self.H @ self.W1[0]  # (M, d); H in place of dH, which has the same size
        dW1 = self.H.t() @ self.rows  # (2n, d)
        return dA, dW2, d_rows, dW1


class TorchGroupedMM(Peer):
    """Sort by expert, gather, grouped_mm, activation, grouped_mm and weighted index_add, all eager.

    No step waits for the device.
    """

    name = "torch-grouped_mm"
    takes_adapters = True

    @classmethod
    def missing(cls, case):
        if not hasattr(F, "grouped_mm"):
            return f"torch {torch.__version__} has no grouped_mm: pip install 'torch>=2.10'"
        return super().missing(case)

    def route(self):
        """Return s (T, K); the pair of each row, (M); the experts' ends, (E) int32."""
        s, ids = self.top_k()
        expert, order = ids.flatten().sort(stable=True)
        every = torch.arange(self.W1.shape[0], device=expert.device)
        return s, order, torch.searchsorted(expert, every, right=True).to(torch.int32)

    def gather(self, order):
        """Return the rows of X by expert, (M, d)."""
        return self.X[order // self.problem.K]

    @staticmethod
    def activate(H, delta, activation):
        """Compute A from H; delta: the adapter's part of H, or None."""
        return glu(H if delta is None else H + delta, activation)

    def combine(self, Y, delta, s, order):
        """Return O (T, d)."""
        weighted = (Y if delta is None else Y + delta) * s.flatten()[order, None]
        return torch.zeros_like(self.X).index_add_(0, order // self.problem.K, weighted)

    def project(self, rows, W, adapter, ends):
        """Return rows W^T, and the adapter's part (rows A^T) (scale B)^T, or None."""
        out = F.grouped_mm(rows, W.transpose(1, 2), offs=ends)
        if not adapter:
            return out, None
        A, B = (factor.to(rows.dtype) for factor in adapter)
        low = F.grouped_mm(rows, A.transpose(1, 2), offs=ends)  # (M, r)
        return out, F.grouped_mm(low, (self.problem.LORA_SCALE * B).transpose(1, 2), offs=ends)

    def forward(self):
        s, order, ends = self.route()
        adapters = self.problem.adapters
        H = self.project(self.gather(order), self.W1, adapters[:2], ends)  # (M, 2n)
        A = self.activate(*H, self.problem.case.activation)
        Y = self.project(A, self.W2, adapters[2:], ends)  # (M, d)
        return self.combine(*Y, s, order)


class TorchGroupedMMCompiled(TorchGroupedMM):
    """TorchGroupedMM with all but sort and GEMMs compiled (dynamic=False).

    Sums over a token's K rows read the rows instead of adding into X's rows, in forward and
    backward: no atomics, float32 inside.
    """

    name = "torch-grouped_mm-compiled"

    def __init__(self, problem):
        from . import compiled

        super().__init__(problem)
        self.compiled = compiled
        self.activate = compiled.glu

    def route(self):
        s, order, ends = super().route()
        self.rows_of_pairs = torch.empty_like(order)
        self.rows_of_pairs[order] = torch.arange(order.numel(), device=order.device)
        return s, order, ends

    def gather(self, order):
        return self.compiled.Gather.apply(self.X, order, self.rows_of_pairs, self.problem.K)

    def combine(self, Y, delta, s, order):
        return self.compiled.Combine.apply(Y, delta, s, order, self.rows_of_pairs)


class SonicMoE(Peer):
    """sonic-moe with a tile search over five shapes.

    A full search needs minutes for every new shape; --cache stores the compiled kernels. Gate and
    up rows are interleaved, as sonic-moe expects.
    """

    name = "sonic-moe"
    packages = ("torch", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")
    install = "pip install sonic-moe==0.1.2.post1 quack-kernels==0.3.11"
    module = "sonicmoe"
    # Tiles are chosen again in each run, and printed: chosen earlier, next to other processes, they
    # may be slow.
    TUNED_AGAIN = {"QUACK_FORCE_CACHE_UPDATE": "1", "QUACK_PRINT_AUTOTUNING": "1"}
    # (tile M, tile N, ping-pong)
    TILES = {(128, 128, True), (128, 192, True), (128, 256, False), (256, 128, False),
             (256, 192, False)}  # fmt: skip

    @classmethod
    def variables(cls, environment):
        return cls.TUNED_AGAIN

    @classmethod
    def missing(cls, case):
        if case.device != "cuda" or case.dtype != "bfloat16":
            return "a GPU and bfloat16 are required"
        if case.zipf:
            return "logits of the case are not supported, because the router is inside"
        if case.activation != "swiglu":
            return "only swiglu is compared"
        return super().missing(case)

    def __init__(self, problem):
        self.keep_tiles()
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_TC_softmax_topk_layer

        super().__init__(problem)
        self.layer, self.activation = moe_TC_softmax_topk_layer, ActivationType.SWIGLU

    @classmethod
    def keep_tiles(cls):
        """Restrict the tiles before sonicmoe is imported, which then makes its list of tiles."""
        from quack import gemm_config

        every = gemm_config.get_all_configs
        if getattr(every, "kept", False):
            return

        def kept(*args, **kwargs):
            fits = lambda c: (c.tile_m, c.tile_n, c.pingpong) in cls.TILES
            return [c for c in every(*args, **kwargs)
                    if c.device_capacity == 9 and not c.swap_ab and fits(c)]  # fmt: skip

        kept.kept = True
        gemm_config.get_all_configs = kept

    @staticmethod
    def rows_of_W1(n):
        return torch.arange(2 * n).view(2, n).t().flatten()

    def forward(self):
        W1, W2 = self.W1.permute(1, 2, 0), self.W2.permute(1, 2, 0)
        stream, inference = torch.cuda.current_stream().cuda_stream, not torch.is_grad_enabled()
        return self.layer(
            self.X, self.router, W1, None, W2, None, self.problem.K, stream, self.activation,
            inference,
        )[0]  # fmt: skip


class ScatterMoE(Peer):
    """GLUMLP of ScatterMoE, whose W1 has the up rows first."""

    name = "scattermoe"
    packages = ("torch", "scattermoe", "triton")
    install = "pip install git+https://github.com/shawntan/scattermoe"
    module = "scattermoe"

    @classmethod
    def missing(cls, case):
        return "a GPU is required" if case.device != "cuda" else super().missing(case)

    def __init__(self, problem):
        from scattermoe.mlp import GLUMLP

        super().__init__(problem)
        case = problem.case
        with torch.device("meta"):
            self.mlp = GLUMLP(case.d, case.n, case.E, case.K,
                              activation=ACTIVATIONS[case.activation])  # fmt: skip
        self.W1 = self.mlp.experts.weight = torch.nn.Parameter(self.W1, self.W1.requires_grad)
        self.W2 = self.mlp.output_experts.weight = torch.nn.Parameter(
            self.W2, self.W2.requires_grad
        )

    @staticmethod
    def rows_of_W1(n):
        return torch.arange(2 * n).roll(n)

    def forward(self):
        return self.mlp(self.X, *self.top_k())


class ScatterMoESm80(ScatterMoE):
    """ScatterMoE with Triton's kernels for GPUs before Hopper: mma.sync instead of wgmma.

    The kernels are in a separate cache, so that the PTX in it is that of the run.
    """

    name = "scattermoe-sm80"
    only_if_named = True

    @classmethod
    def variables(cls, environment):
        cache = environment.get("TRITON_CACHE_DIR") or pathlib.Path.home() / ".triton" / "cache"
        folder = pathlib.Path(cache) / cls.name
        return {"TRITON_OVERRIDE_ARCH": "sm80", "TRITON_CACHE_DIR": str(folder)}

    def wrong_kernels(self, names=()):
        folder = pathlib.Path(os.environ["TRITON_CACHE_DIR"])
        texts = [file.read_text() for file in sorted(folder.rglob("*.ptx"))]
        if any("wgmma." in text for text in texts) or not any("mma.sync." in t for t in texts):
            return f"the PTX in {folder} has wgmma, or no mma.sync"
        return None


ACTS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "reglu": "relu"}


class Transformers(Peer):
    """Experts of Mixtral with one of Hugging Face's implementations."""

    packages = ("torch", "transformers")
    install = "pip install transformers==5.17"
    module = "transformers"
    implementation = ""

    @classmethod
    def missing(cls, case):
        if reason := super().missing(case):
            return reason
        if case.activation not in ACTS:
            return f"{case.activation} is not compared"
        loadable = _loadable(cls.implementation)
        if loadable is None:
            return None
        if case.device != "cuda":
            return "a GPU is required"
        try:
            loadable(raise_error=True)
        except ImportError as error:
            return str(error)
        return None

    @classmethod
    def working_bytes(cls, case):
        if cls.implementation != "batched_mm":
            return super().working_bytes(case)
        # A copy of the chosen expert's weights for every pair, and its gradient.
        return 6 * case.rows * case.n * case.d * DTYPES[case.dtype].itemsize

    def __init__(self, problem):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__(problem)
        case = problem.case
        config = MixtralConfig(
            hidden_size=case.d, intermediate_size=case.n, num_local_experts=case.E,
            hidden_act=ACTS[case.activation],
        )  # fmt: skip
        config._experts_implementation = self.implementation
        with torch.device("meta"):
            self.experts = MixtralExperts(config)
        self.W1 = self.experts.gate_up_proj = torch.nn.Parameter(self.W1, self.W1.requires_grad)
        self.W2 = self.experts.down_proj = torch.nn.Parameter(self.W2, self.W2.requires_grad)

    def forward(self):
        s, ids = self.top_k()
        return self.experts(self.X, ids, s)


class Peft(Transformers):
    """PEFT's adapters of Mixtral's experts.

    Each forward adds scale B A to the weights of every expert, twice for a training step. TileMoE's
    experts compute them in their GEMMs (tilemoe.peft).
    """

    packages = ("torch", "transformers", "peft")
    install = "pip install peft==0.21 transformers==5.17"
    module = "peft"
    takes_adapters = True

    @classmethod
    def missing(cls, case):
        return super().missing(case) or (None if case.lora_rank else "adapters are required")

    def __init__(self, problem):
        import peft

        if self.implementation == "tilemoe":
            import tilemoe.peft

            tilemoe.peft.register()
        super().__init__(problem)
        r = problem.case.lora_rank
        model = torch.nn.Module()
        model.experts = self.experts.requires_grad_(False)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=r, lora_alpha=r * problem.LORA_SCALE, target_modules=[],
                                 target_parameters=names)  # fmt: skip
        self.experts = layer = peft.get_peft_model(model, config).base_model.model.experts
        factors = {}
        while hasattr(layer, "parameter_name"):  # nested wrappers, one per parameter
            factors[layer.parameter_name] = (layer.lora_A["default"].weight,
                                             layer.lora_B["default"].weight)  # fmt: skip
            layer = layer.base_layer
        E, A1, B1, A2, B2 = problem.case.E, *problem.adapters
        self.factors = [*factors["gate_up_proj"], *factors["down_proj"]]
        with torch.no_grad():  # A (E r, in), B (out, r E): its columns are by rank, then by expert
            for own, A in zip(self.factors[::2], (A1, A2)):
                own.copy_(A.flatten(0, 1))
            for own, B in zip(self.factors[1::2], (B1, B2)):
                own.copy_(B.permute(1, 2, 0).flatten(1))
        self.shape_A = lambda dA: dA.unflatten(0, (E, r))
        self.shape_B = lambda dB: dB.unflatten(1, (r, E)).permute(2, 0, 1)

    def backward(self, O):
        dX, *of = torch.autograd.grad(O, [self.X, *self.factors], self.problem.dO)
        shapes = (self.shape_A, self.shape_B) * 2
        return dX, *(shape(gradient) for shape, gradient in zip(shapes, of))


def _loadable(implementation):
    """Return transformers' own test of whether an implementation's kernels can be loaded.

    The result is None if the implementation computes with torch's operators (only deepgemm and
    sonicmoe do not).
    """
    try:
        module = importlib.import_module(f"transformers.integrations.{implementation}")
    except ImportError:
        return None
    return getattr(module, f"is_{implementation}_loadable", None)


def _transformers():
    """Return one peer per implementation of transformers, with TileMoE's if it is installed.

    If transformers is not installed, the peer reports it.
    """
    if importlib.util.find_spec("transformers") is None:
        return [type("Transformers", (Transformers,), {"name": "transformers"})]
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if importlib.util.find_spec("tilemoe") is not None:
        import tilemoe.transformers

        tilemoe.transformers.register()
    kinds = ("eager", *sorted(ALL_EXPERTS_FUNCTIONS))
    return [type(of.__name__, (of,), {"name": f"{prefix}-{kind}", "implementation": kind})
            for prefix, of in (("transformers", Transformers), ("peft", Peft))
            for kind in kinds]  # fmt: skip


PEERS = {peer.name: peer for peer in (
    TileMoE, TileMoEKeeping, TileMoEOverwriting, TileMoESmall, TileMoEGatheredMM, TileMoEFrozen,
    TileMoEBefore,
    *_QUANTIZED, *RECIPES.values(),
    TileMoESm80, TileMoESm90, TorchDense, TorchGroupedMM, TorchGroupedMMCompiled, SonicMoE, ScatterMoE,
    ScatterMoESm80,
)}  # fmt: skip


def all_peers():
    """Return {name: class}, TileMoE first."""
    return {**PEERS, **{peer.name: peer for peer in _transformers()}}


def peer_named(name):
    """Return the class of a peer, without importing transformers if it is not needed."""
    return PEERS.get(name) or all_peers()[name]
