"""The implementations that take turns: each a whole layer, router included, as its users call it.

SwiGLU, top-K by softmax over the chosen. A peer is made from a Problem and keeps it; it may hold W1
in a row order of its own. What cannot run says why, and what would mend it."""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import sys

import torch
import torch.nn.functional as F

from .cases import DTYPES


def _swiglu(H):
    """H (M, 2n) -> A (M, n)"""
    gate, up = H.chunk(2, dim=-1)
    return F.silu(gate) * up


class Peer:
    name = ""
    settings = {}  # that a reader has to know beside the versions
    packages = ("torch",)  # whose versions tell what was measured
    install = ""  # what makes it available
    module = None  # that it imports
    only_if_named = False  # not among the peers that run where none are named
    is_layer = True  # else a yardstick, which no formula is held to and whose memory says nothing

    @classmethod
    def variables(cls):
        """Of the environment of a process of its own, beside this one's."""
        return {}

    @classmethod
    def missing(cls, case):
        """Why it cannot run this case, or None."""
        if cls.module is not None and importlib.util.find_spec(cls.module) is None:
            return f"not installed: {cls.install}"
        if case.rounding is not None:
            return "it has no token rounding"
        return None

    @staticmethod
    def working_bytes(case):
        """About what it holds at once beside weights, gradients and tokens: some copies of the
        gathered rows and of H."""
        return 3 * case.rows * (case.d + 3 * case.n) * DTYPES[case.dtype].itemsize

    def __init__(self, problem):
        self.problem = problem
        order = self.rows_of_W1(problem.case.n)
        self.order = order if order is None else order.to(problem.X.device)
        W1 = problem.W1
        if order is not None:
            W1 = W1.detach()[:, self.order].contiguous().requires_grad_()
        self.X, self.router, self.W1, self.W2 = problem.X, problem.router, W1, problem.W2

    @staticmethod
    def rows_of_W1(n):
        """(2n): for each row of W1 as the peer wants it, the row of the problem's, whose gate rows
        come first. None where the two are one."""
        return None

    def forward(self):
        """-> O (T, d)"""
        raise NotImplementedError

    def backward(self, O):
        """-> dX, drouter, dW1, dW2, the last two in the peer's layout."""
        leaves = [self.X, self.router, self.W1, self.W2]
        return torch.autograd.grad(O, leaves, self.problem.dO)

    def given_layout(self, dW1):
        """dW1 with the problem's order of rows."""
        if self.order is None:
            return dW1
        given = torch.empty_like(dW1)
        given[:, self.order] = dW1
        return given

    def top_k(self):
        """scores (T, K) of X's type and ids (T, K), as PyTorch users write them."""
        top, ids = self.problem.logits().float().topk(self.problem.K, dim=-1)
        return top.softmax(dim=-1).to(self.X.dtype), ids


class TileMoE(Peer):
    """The call with no option."""

    name = "tilemoe"
    packages = ("torch", "tilemoe")
    options = {}

    @classmethod
    def missing(cls, case):
        if importlib.util.find_spec("tilemoe") is None:
            return "not installed: pip install . in its source tree"
        if case.device == "cuda" and case.dtype == "float32":
            return "on a GPU it takes bfloat16 and float16"
        return None

    def forward(self):
        from tilemoe import moe

        p = self.problem
        return moe(
            p.X, p.logits(), p.W1, p.W2, K=p.K, rounding=p.rounding, **self.options
        )  # fmt: skip


class TileMoEKeeping(TileMoE):
    """H stays as it is in backward."""

    name = "tilemoe-keeps-h"
    only_if_named = True
    options = {"overwrite_H": False}


class TileMoEOverwriting(TileMoE):
    """Backward writes dH over H."""

    name = "tilemoe-dh-over-h"
    only_if_named = True
    options = {"overwrite_H": True}


class TileMoESmall(TileMoE):
    """The one of least memory: Y and dX~ exist in four blocks of columns besides."""

    name = "tilemoe-small-peak"
    only_if_named = True
    options = {"overwrite_H": True, "column_blocks": 4}


class TileMoEBefore(TileMoE):
    """Another build of the package, which a process of its own has on its path."""

    name = "tilemoe-before"
    only_if_named = True


class TileMoESm80(TileMoE):
    """The products by mma.sync, on whatever GPU. The choice of a kit is the whole process's, so it
    is taken back after each call."""

    name = "tilemoe-sm80"
    only_if_named = True
    kit = "sm80"
    devices = ("cuda",)

    @classmethod
    def missing(cls, case):
        if reason := super().missing(case):
            return reason
        import tilemoe

        if not hasattr(tilemoe, "set_kit"):
            return "this tilemoe has no kits to choose from"
        return None if case.device in cls.devices else "it runs on a GPU"

    @contextlib.contextmanager
    def chosen(self):
        from tilemoe import set_kit

        set_kit(self.kit)
        try:
            yield
        finally:
            set_kit("auto")

    def forward(self):
        with self.chosen():
            return super().forward()

    def backward(self, O):
        with self.chosen():
            return super().backward(O)


class TileMoESm90(TileMoESm80):
    """The products by wgmma."""

    name = "tilemoe-sm90"
    kit = "sm90"


class TorchDense(Peer):
    """The experts' products as dense ones of the same M, N and K, each one torch.mm: one expert's
    weights for all pairs' rows. No router, gather, activation or combine."""

    name = "torch-dense"
    only_if_named = True
    is_layer = False

    def __init__(self, problem):
        super().__init__(problem)
        case = problem.case
        # A pair's rows of X and of dO, as they would be gathered.
        pairs = torch.arange(case.rows, device=self.X.device) // case.K
        with torch.no_grad():
            self.rows, self.d_rows = self.X[pairs], problem.dO[pairs]  # (M, d)
            self.H = self.rows @ self.W1[0].t()  # (M, 2n)
            self.A = _swiglu(self.H)  # (M, n)

    @torch.no_grad()
    def forward(self):
        self.H = self.rows @ self.W1[0].t()
        return self.A @ self.W2[0].t()  # Y (M, d)

    @torch.no_grad()
    def backward(self, O):
        dA = self.d_rows @ self.W2[0]  # (M, n)
        dW2 = self.d_rows.t() @ self.A  # (d, n)
        d_rows = self.H @ self.W1[0]  # (M, d); H for dH, which is as large
        dW1 = self.H.t() @ self.rows  # (2n, d)
        return dA, dW2, d_rows, dW1


class TorchGroupedMM(Peer):
    """Sort by expert, gather, grouped_mm, SwiGLU, grouped_mm, weighted index_add, all eager. No
    step waits for the device."""

    name = "torch-grouped_mm"
    settings = {"torch.compile": "no"}

    @classmethod
    def missing(cls, case):
        if not hasattr(F, "grouped_mm"):
            return f"torch {torch.__version__} has no grouped_mm: pip install 'torch>=2.10'"
        return super().missing(case)

    def route(self):
        """-> s (T, K); the pair that stands in each row, (M); the experts' ends, (E) int32."""
        s, ids = self.top_k()
        expert, order = ids.flatten().sort(stable=True)
        every = torch.arange(self.W1.shape[0], device=expert.device)
        return s, order, torch.searchsorted(expert, every, right=True).to(torch.int32)

    def gather(self, order):
        """-> the rows of X by expert, (M, d)"""
        return self.X[order // self.problem.K]

    activate = staticmethod(_swiglu)

    def combine(self, Y, s, order):
        """-> O (T, d)"""
        weighted = Y * s.flatten()[order, None]
        return torch.zeros_like(self.X).index_add_(0, order // self.problem.K, weighted)

    def forward(self):
        s, order, ends = self.route()
        H = F.grouped_mm(self.gather(order), self.W1.transpose(1, 2), offs=ends)  # (M, 2n)
        Y = F.grouped_mm(self.activate(H), self.W2.transpose(1, 2), offs=ends)  # (M, d)
        return self.combine(Y, s, order)


class TorchGroupedMMCompiled(TorchGroupedMM):
    """The same with all but sort and products compiled. Sums over a token's K rows read them in
    place of adding into X's rows, forward and backward: no atomics, and float32 inside."""

    name = "torch-grouped_mm-compiled"
    settings = {"torch.compile": "gather, SwiGLU and weighted sum, dynamic=False"}

    def __init__(self, problem):
        from . import compiled

        super().__init__(problem)
        self.compiled = compiled
        self.activate = compiled.swiglu

    def route(self):
        s, order, ends = super().route()
        self.rows_of_pairs = torch.empty_like(order)
        self.rows_of_pairs[order] = torch.arange(order.numel(), device=order.device)
        return s, order, ends

    def gather(self, order):
        return self.compiled.Gather.apply(self.X, order, self.rows_of_pairs, self.problem.K)

    def combine(self, Y, s, order):
        return self.compiled.Combine.apply(Y, s, order, self.rows_of_pairs)


class SonicMoE(Peer):
    """Its tile search is kept to five shapes, as a full one takes minutes for every new shape;
    QUACK_CACHE_DIR keeps what it compiled. Gate and up rows are interleaved, as it wants them."""

    name = "sonic-moe"
    packages = ("torch", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")
    install = "pip install sonic-moe==0.1.2.post1 quack-kernels==0.3.11"
    module = "sonicmoe"
    # (tile M, tile N, ping-pong)
    TILES = {
        (128, 128, True),
        (128, 192, True),
        (128, 256, False),
        (256, 128, False),
        (256, 192, False),
    }
    settings = {"tiles": [f"{m}x{n}{' ping-pong' if p else ''}" for m, n, p in sorted(TILES)],
                "entry": "moe_TC_softmax_topk_layer"}  # fmt: skip

    @classmethod
    def missing(cls, case):
        if case.device != "cuda" or case.dtype != "bfloat16":
            return "it runs on a GPU in bfloat16"
        if case.zipf:
            return "it has its router inside, and the case prescribes logits"
        return super().missing(case)

    def __init__(self, problem):
        self.keep_tiles()
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_TC_softmax_topk_layer

        super().__init__(problem)
        self.layer, self.activation = moe_TC_softmax_topk_layer, ActivationType.SWIGLU

    @classmethod
    def keep_tiles(cls):
        """To be called before sonicmoe is imported, which then makes its list of tiles."""
        from quack import gemm_config

        every = gemm_config.get_all_configs
        if getattr(every, "kept", False):
            return

        def kept(*args, **kwargs):
            return [
                c
                for c in every(*args, **kwargs)
                if c.device_capacity == 9
                and not c.swap_ab
                and (c.tile_m, c.tile_n, c.pingpong) in cls.TILES
            ]

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
    """Its GLUMLP, whose W1 has the up rows first."""

    name = "scattermoe"
    packages = ("torch", "scattermoe", "triton")
    install = "pip install git+https://github.com/shawntan/scattermoe"
    module = "scattermoe"

    @classmethod
    def variables(cls):
        """Caches of its own, so that what lies there is what it ran. Its one function under
        torch.compile is small, and is compiled here: else Inductor starts a process a core first."""
        home = pathlib.Path.home()
        folders = {
            "TRITON_CACHE_DIR": home / ".triton" / "cache",
            "TORCHINDUCTOR_CACHE_DIR": home / ".cache" / "torchinductor",
        }
        places = {
            name: str(pathlib.Path(os.environ.get(name) or otherwise) / cls.name)
            for name, otherwise in folders.items()
        }
        return {**places, "TORCHINDUCTOR_COMPILE_THREADS": "1"}

    @classmethod
    def missing(cls, case):
        return "it runs on a GPU" if case.device != "cuda" else super().missing(case)

    @property
    def settings(self):
        """Which tensor cores' instructions the PTX in its cache has. Triton keeps the PTX of every
        kernel that it runs."""
        folder = os.environ.get("TRITON_CACHE_DIR", "")
        if pathlib.Path(folder).name != self.name:
            return {}  # it shares others' cache
        return {"TRITON_OVERRIDE_ARCH": os.environ.get("TRITON_OVERRIDE_ARCH", "none"),
                **instructions_in(pathlib.Path(folder))}  # fmt: skip

    def __init__(self, problem):
        from scattermoe.mlp import GLUMLP

        super().__init__(problem)
        case = problem.case
        with torch.device("meta"):
            self.mlp = GLUMLP(case.d, case.n, case.E, case.K)
        self.W1 = self.mlp.experts.weight = torch.nn.Parameter(self.W1)
        self.W2 = self.mlp.output_experts.weight = torch.nn.Parameter(self.W2)

    @staticmethod
    def rows_of_W1(n):
        return torch.arange(2 * n).roll(n)

    def forward(self):
        return self.mlp(self.X, *self.top_k())


class ScatterMoESm80(ScatterMoE):
    """The same kernels as Triton makes them for GPUs before Hopper: mma.sync in place of wgmma,
    then assembled for the GPU that is there."""

    name = "scattermoe-sm80"
    only_if_named = True

    @classmethod
    def variables(cls):
        return {**super().variables(), "TRITON_OVERRIDE_ARCH": "sm80"}

    @classmethod
    def missing(cls, case):
        # Triton reads it once, when it is imported.
        if os.environ.get("TRITON_OVERRIDE_ARCH") != "sm80":
            return "it needs a process of its own: --packages scattermoe-sm80=DIR"
        return super().missing(case)


def instructions_in(folder):
    """{what: how many kernels' PTX} in a cache of Triton's."""
    texts = [file.read_text() for file in sorted(folder.rglob("*.ptx"))]
    return {"kernels": len(texts),
            **{f"with {name}": sum(f"{name}." in text for text in texts)
               for name in ("wgmma", "mma.sync")}}  # fmt: skip


class Transformers(Peer):
    """Mixtral's experts by one of Hugging Face's implementations of them."""

    packages = ("torch", "transformers")
    install = "pip install transformers==5.17"
    module = "transformers"
    implementation = ""

    @classmethod
    def missing(cls, case):
        if reason := super().missing(case):
            return reason
        loadable = _loadable(cls.implementation)
        if loadable is None:
            return None
        if case.device != "cuda":
            return "it runs on a GPU"
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
            hidden_size=case.d, intermediate_size=case.n, num_local_experts=case.E
        )
        config._experts_implementation = self.implementation
        with torch.device("meta"):
            self.experts = MixtralExperts(config)
        self.W1 = self.experts.gate_up_proj = torch.nn.Parameter(self.W1)
        self.W2 = self.experts.down_proj = torch.nn.Parameter(self.W2)

    def forward(self):
        s, ids = self.top_k()
        return self.experts(self.X, ids, s)


def _loadable(implementation):
    """transformers' own test of whether an implementation's kernels can be loaded, of those that it
    does not compute with torch's operators (deepgemm, sonicmoe); else None."""
    try:
        module = importlib.import_module(f"transformers.integrations.{implementation}")
    except ImportError:
        return None
    return getattr(module, f"is_{implementation}_loadable", None)


def _transformers():
    """A peer for each of its implementations, TileMoE's among them where this runs inside of it;
    one that is not there where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return [type("Transformers", (Transformers,), {"name": "transformers"})]
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if "tilemoe" in sys.modules:
        import tilemoe.transformers

        tilemoe.transformers.register()
    return [
        type(
            "Transformers",
            (Transformers,),
            {"name": f"transformers-{kind}", "implementation": kind},
        )
        for kind in ("eager", *sorted(ALL_EXPERTS_FUNCTIONS))
    ]


def all_peers():
    """Name -> class, TileMoE first."""
    peers = [TileMoE, TileMoEKeeping, TileMoEOverwriting, TileMoESmall, TileMoEBefore]
    peers += [TileMoESm80, TileMoESm90, TorchDense]
    peers += [TorchGroupedMM, TorchGroupedMMCompiled, SonicMoE, ScatterMoE, ScatterMoESm80]
    peers += _transformers()
    return {peer.name: peer for peer in peers}
