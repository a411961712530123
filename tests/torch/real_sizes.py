"""A layer of a real model's size, every row of every tensor: O, dX, dlogits, dW1, dW2 of
`tilemoe.moe(x, logits, W1, W2, K=K)` and its backward, against

- a 16-bit layer of plain PyTorch, differentiated by autograd: no row may be farther from it than
  LOOSE of its norm. Both have errors below 1 %, and a row that is lost, or another one, is off by 1;
- float64: no tensor may be farther from the exact layer than WHOLE times, and no row farther than
  ROW times the worst row of, a float64 layer that rounds where the library stores (stored.py).

Copies of the results are then spoiled (a row zeroed, two swapped, an expert dropped, at the ends and
in between): each must fail by each of the two yardsticks. All of it goes expert by expert, so that
float64 never holds more of the weights than one.

  python tests/torch/real_sizes.py qwen3-235b --json qwen3-235b.json

checks layers of python/tilemoe/bench/layers.inc on this machine's GPU. The exit status is 1 if a bound
does not hold.
"""

import argparse
import json
import pathlib
import sys
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

import stored
import tilemoe
from reference import topk_router
from tilemoe.bench import layers

LAYERS = layers.LAYERS["cuda"]
LOOSE = 0.05
WHOLE, ROW = 1.05, 1.25
ACT = {"activation": "swiglu"}


class Yardsticks(NamedTuple):
    """From which norm on, in parts of the rms norm, a row is measured against its own. A row of
    dlogits is of the differences of a token's ds, which may nearly all cancel."""

    exact: float = 1e-2
    plain: float = 0.1


SMALLEST = {"dlogits": Yardsticks(0.1, 1.0)}
OUTPUTS = ("O", "dX", "dlogits", "dW1", "dW2")


# ---------------------------------------------------------------- the layer


def make(layer, device="cuda", dtype=torch.bfloat16, seed=1):
    """Unit-scale data by the names of `moe`'s arguments, and dO."""
    g = torch.Generator(device).manual_seed(seed)
    T, d, n, E, _ = layer
    normal = lambda *shape: torch.randn(shape, generator=g, device=device)
    tensors = {"x": normal(T, d).to(dtype), "dO": normal(T, d).to(dtype)}
    tensors["logits"] = normal(T, E)
    for name, rows, columns in ("W1", 2 * n, d), ("W2", d, n):
        weight = torch.empty(E, rows, columns, dtype=dtype, device=device)
        for e in range(E):  # float32 of all would be twice the weights
            weight[e] = normal(rows, columns) * columns**-0.5
        tensors[name] = weight
    return tensors


def run(tensors, K):
    """The layer as a user calls it -> {name of the output: tensor}"""
    leaves = [tensors[name].detach().requires_grad_() for name in ("x", "logits", "W1", "W2")]
    O = tilemoe.moe(*leaves, K=K)
    O.backward(tensors["dO"])
    x, logits, W1, W2 = leaves
    gradients = {"dX": x.grad, "dlogits": logits.grad, "dW1": W1.grad, "dW2": W2.grad}
    return {"O": O.detach()} | gradients


# ---------------------------------------------------------------- the yardsticks


class Sums:
    """The sums of a yardstick over the experts: O, dX (T, d), ds (T * K)."""

    def __init__(self, x, pairs, dtype):
        self.O = torch.zeros(x.shape, dtype=dtype, device=x.device)
        self.dX = torch.zeros_like(self.O)
        self.ds = torch.zeros(pairs, dtype=dtype, device=x.device)

    def add(self, tokens, pairs, weighted_Y, dX, ds):
        # An expert has a token once: nothing is added to one place twice.
        self.O.index_add_(0, tokens, weighted_Y.to(self.O.dtype))
        self.dX.index_add_(0, tokens, dX.to(self.O.dtype))
        self.ds[pairs] = ds.to(self.O.dtype)


def of_float64(x, dO, s, W1, W2, dtype):
    """-> s Y, Gradients: one expert's rows."""
    H, Y = stored.forward(x, W1, W2, None, None, ACT, dtype)
    return s.unsqueeze(-1) * Y, stored.backward(x, s, H, dO, W1, W2, None, None, ACT, dtype)


def of_plain(x, dO, s, W1, W2):
    """The same by PyTorch's own operations on 16 bits, elementwise work in float32."""
    leaves = [t.detach().requires_grad_() for t in (x, s.float(), W1, W2)]
    x, s, W1, W2 = leaves
    gate, up = torch.mm(x, W1.t()).float().chunk(2, dim=1)
    A = (F.silu(gate) * up).to(x.dtype)
    weighted = torch.mm(A, W2.t()).float() * s.unsqueeze(-1)
    return weighted.detach(), stored.Gradients(
        *torch.autograd.grad(weighted, leaves, dO.float()), None, None
    )


class RowErrors:
    """The squares of one output's rows: truth, distances from it, distances from the plain layer."""

    def __init__(self, name, rows, device):
        zeros = lambda: torch.zeros(rows, dtype=torch.float64, device=device)
        self.name, self.smallest = name, SMALLEST.get(name, Yardsticks())
        self.truth, self.got, self.ours, self.rounding = zeros(), zeros(), zeros(), zeros()
        self.plain, self.off_plain = zeros(), zeros()

    def put(self, rows, got, exact, rounding, plain):
        """Rows (a slice) of what we gave and of the yardsticks, (rows, columns) each."""
        square = lambda t: t.square().sum(-1)
        got = got.double()
        self.truth[rows], self.got[rows] = square(exact), square(got)
        self.ours[rows] = square(got - exact)
        self.rounding[rows] = square(rounding - exact)
        plain = plain.double()
        self.plain[rows], self.off_plain[rows] = square(plain), square(got - plain)

    def copy(self):
        other = RowErrors(self.name, 0, "cpu")
        for name, value in vars(self).items():
            setattr(other, name, value.clone() if torch.is_tensor(value) else value)
        return other

    def result(self):
        """-> {figure: number}, and under "failed" which bounds do not hold. NaN holds none."""
        whole = lambda off: _relative(off.sum(), self.truth.sum()).item()
        row, at = _worst(self.ours, self.truth, self.smallest.exact)
        expected_row, _ = _worst(self.rounding, self.truth, self.smallest.exact)
        off_plain, plain_at = _worst(self.off_plain, self.plain, self.smallest.plain)
        lost = int(((self.got == 0) & (self.truth > 0)).sum())
        figures = {
            "error": whole(self.ours),
            "expected_error": whole(self.rounding),
            "worst_row": row,
            "expected_worst_row": expected_row,
            "row": at,
            "worst_row_off_plain": off_plain,
            "row_off_plain": plain_at,
            "rows_lost": lost,
        }
        holds = {
            "exact": figures["error"] <= WHOLE * figures["expected_error"]
            and row <= ROW * expected_row
            and lost == 0,
            "plain": off_plain <= LOOSE,
        }
        return figures | {"failed": [name for name, good in holds.items() if not good]}


def _relative(off, norm):
    """Square roots' ratio; nothing may be off where the norm is zero."""
    return torch.where((off == 0) & (norm == 0), 0.0, (off / norm).sqrt())


def _worst(off, norm, smallest):
    """-> the worst row's relative distance, its index. A zero row (an expert without a token) has to
    be zero to the bit; another small one is measured against `smallest` of the rms norm."""
    if off.numel() == 0:
        return 0.0, -1
    floor = smallest**2 * norm.mean()
    each = torch.where(norm == 0, _relative(off, norm), _relative(off, norm.clamp(min=floor)))
    at = int(each.nan_to_num(nan=torch.inf).argmax())
    return each[at].item(), at


class Comparison:
    """Our results next to the yardsticks. `kept` experts' weight gradients stay, to be spoiled."""

    def __init__(self, layer, tensors, ours):
        self.layer, self.ours = layer, ours
        T, d, n, E, K = layer
        x, device = tensors["x"], tensors["x"].device
        rows = {"O": T, "dX": T, "dlogits": T, "dW1": 2 * n * E, "dW2": d * E}
        self.errors = {name: RowErrors(name, rows[name], device) for name in OUTPUTS}
        logits = tensors["logits"].double().requires_grad_()
        scores, ids = topk_router(logits, K, ids_dtype=torch.int64)
        self.ids = ids
        # Pairs by expert, then by token; a pair's number is token * K + k.
        self.order = ids.reshape(-1).argsort(stable=True)
        self.counts = torch.bincount(ids.reshape(-1), minlength=E).tolist()
        self.kept = {}
        self.keep = sorted({0, E // 2 + 1, E - 1} & set(range(E)))
        sums = [Sums(x, T * K, t) for t in (torch.float64, torch.float64, torch.float32)]
        self._add_experts(tensors, scores.detach().reshape(-1), sums)
        self._put_tokens(sums, scores, logits, x.dtype)

    def _add_experts(self, tensors, scores, sums):
        K, dtype = self.layer.K, tensors["x"].dtype
        for e, pairs in enumerate(self.order.split(self.counts)):
            tokens, s = pairs // K, scores[pairs]
            x, dO = tensors["x"][tokens], tensors["dO"][tokens]
            W1, W2 = tensors["W1"][e], tensors["W2"][e]
            wide = x.double(), dO.double(), s, W1.double(), W2.double()
            of_e = of_float64(*wide, None), of_float64(*wide, dtype), of_plain(x, dO, s, W1, W2)
            for sum_, (weighted, gradients) in zip(sums, of_e):
                sum_.add(tokens, pairs, weighted, gradients.x, gradients.s)
            (weighted, exact), (_, rounding), (_, plain) = of_e
            for name, want, expected, other in (
                ("dW1", exact.W1, rounding.W1, plain.W1),
                ("dW2", exact.W2, rounding.W2, plain.W2),
            ):
                yardsticks = want, stored.rounded(expected, dtype), other
                self._put_expert(self.errors[name], e, self.ours[name][e], yardsticks)
                if e in self.keep:
                    self.kept[name, e] = yardsticks
            if e in self.keep:
                self.kept["share", e] = tokens, weighted, exact.x

    @staticmethod
    def _put_expert(errors, e, got, yardsticks):
        rows = got.shape[0]
        errors.put(slice(e * rows, (e + 1) * rows), got, *yardsticks)

    def _put_tokens(self, sums, scores, logits, dtype):
        exact, rounding, plain = sums
        self.of_tokens = {
            name: (
                getattr(exact, name),
                stored.rounded(getattr(rounding, name), dtype),
                getattr(plain, name).to(dtype),
            )
            for name in ("O", "dX")
        }
        of_ds = lambda ds: torch.autograd.grad(
            scores, logits, ds.to(scores.dtype).view_as(scores), retain_graph=True
        )[0]
        self.of_tokens["dlogits"] = tuple(of_ds(one.ds) for one in sums)
        for name, yardsticks in self.of_tokens.items():
            self.errors[name].put(slice(None), self.ours[name], *yardsticks)
        chosen = torch.zeros_like(self.ours["dlogits"], dtype=torch.bool)
        chosen.scatter_(1, self.ids, True)
        self.strays = int((self.ours["dlogits"].masked_fill(chosen, 0) != 0).sum())

    def results(self):
        return {name: errors.result() for name, errors in self.errors.items()}

    # ------------------------------------------------------------ spoiled copies

    def missed_spoilings(self, seed=5):
        """-> how many were tried, [what a yardstick let pass]"""
        tried, missed = 0, []
        for name, what, errors in self._spoiled(torch.Generator().manual_seed(seed)):
            tried += 1
            failed = errors.result()["failed"]
            missed += [f"{name}, {what}: {y}" for y in ("exact", "plain") if y not in failed]
        return tried, missed

    def _spoiled(self, generator):
        for name in ("O", "dX", "dlogits"):
            yield from self._spoiled_tokens(name, generator)
        for name in ("dW1", "dW2"):
            for e in self.keep:
                if self.counts[e] > 0:
                    yield from self._spoiled_expert(name, e, generator)

    def _spoiled_tokens(self, name, generator):
        errors, ours, yardsticks = self.errors[name], self.ours[name], self.of_tokens[name]

        def judged(edit):
            spoiled, trial = ours.clone(), errors.copy()
            edit(spoiled)
            trial.put(slice(None), spoiled, *yardsticks)
            return trial

        for what, edit in row_edits(errors.truth, generator):
            yield name, what, judged(edit)
        for e in self.keep:
            tokens, weighted, dX = self.kept["share", e]
            if len(tokens) == 0:
                continue

            def drop(spoiled):
                if name == "dlogits":
                    spoiled[:, e] = 0
                else:
                    share = weighted if name == "O" else dX
                    spoiled[tokens] = (spoiled[tokens].double() - share).to(spoiled.dtype)

            yield name, f"expert {e} dropped", judged(drop)

    def _spoiled_expert(self, name, e, generator):
        ours, yardsticks, rows = self.ours[name][e], self.kept[name, e], self.ours[name].shape[1]
        truth = self.errors[name].truth[e * rows : (e + 1) * rows]
        edits = [*row_edits(truth, generator), ("dropped", lambda spoiled: spoiled.zero_())]
        for what, edit in edits:
            spoiled, trial = ours.clone(), self.errors[name].copy()
            edit(spoiled)
            self._put_expert(trial, e, spoiled, yardsticks)
            yield name, f"expert {e}, {what}", trial


def row_edits(truth, generator, inside=2):
    """truth: squared norms of rows -> (what it does, what does it): rows zeroed and swapped, the
    first, the last, some between. A row matters whose norm is half of the rms norm or more."""
    matter = (truth >= 0.25 * truth.mean()).nonzero().squeeze(-1).tolist()
    between = torch.randint(len(matter), (inside,), generator=generator, device="cpu").tolist()
    for i in (0, len(matter) - 1, *between):
        row, other = matter[i], matter[i - 1]

        def zero(spoiled, row=row):
            spoiled[row] = 0

        def swap(spoiled, row=row, other=other):
            spoiled[[row, other]] = spoiled[[other, row]]

        yield f"row {row} zeroed", zero
        if row != other:
            yield f"rows {row} and {other} swapped", swap


# ---------------------------------------------------------------- all of it


def check(layer, device="cuda", seed=1):
    """-> what the results file says of a layer; under "failed" what is wrong."""
    begin = time.monotonic()
    tensors = make(layer, device, seed=seed)
    ours, again = run(tensors, layer.K), run(tensors, layer.K)
    other_bits = [name for name in OUTPUTS if not torch.equal(ours[name], again[name])]
    del again
    comparison = Comparison(layer, tensors, ours)
    results = comparison.results()
    tried, missed = comparison.missed_spoilings()
    failed = [f"{name}: {y}" for name, result in results.items() for y in result["failed"]]
    failed += [f"{name}: other bits in a second run" for name in other_bits]
    failed += [f"let pass: {what}" for what in missed]
    if comparison.strays:
        failed.append(f"dlogits: {comparison.strays} of experts that no token chose are not zero")
    ratio = {name: v["error"] / max(v["expected_error"], 1e-300) for name, v in results.items()}
    found = {
        **layer._asdict(),
        "failed": failed,
        "error_over_expected": ratio,
        "outputs": results,
        "spoilings_tried": tried,
        "seconds": round(time.monotonic() - begin, 2),
    }
    if torch.device(device).type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
    return found


def main():
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layers", nargs="+", metavar="layer", help=", ".join(LAYERS))
    parser.add_argument("--device", default="cuda", help="cpu takes hours")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path, help="file for the layers' figures together")
    args = parser.parse_args()
    for name in args.layers:
        if name not in LAYERS:
            parser.error(f"no layer is called {name}; the layers are {', '.join(LAYERS)}")
    failed, worst, tried = [], 0.0, 0
    for name in args.layers:
        found = check(LAYERS[name], args.device, args.seed)
        failed += [f"{name}: {line}" for line in found["failed"]]
        worst = max(worst, *found["error_over_expected"].values())
        tried += found["spoilings_tried"]
        print(json.dumps({name: found}, indent=1), flush=True)
        for line in found["failed"]:
            print(f"{name}: FAILED: {line}", flush=True)
        if args.json:
            figures = {"failures": len(failed), "largest_error_over_expected": worst,
                       "spoilings": tried, "failed": "; ".join(failed)}  # fmt: skip
            args.json.write_text(json.dumps(figures) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
