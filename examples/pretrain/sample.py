"""Samples text from what train.py has trained, in one process, on the GPU if the machine has one.

    python examples/pretrain/sample.py runs/tiny --prompt "The layer" --tokens 200 --seed 1

The text goes to stdout as it comes, all else to stderr.
"""

import os
import sys
import time
from pathlib import Path

import torch

import plan
import trained
from configs import Refusal
from model import Cache
from options import Parser, real, whole
from parallel import set_threads


class Sampler:
    """Draws a token from logits (vocabulary). The same seed draws the same on the same device."""

    def __init__(self, seed, temperature=1.0, top_k=None, top_p=1.0, vocabulary=None):
        """top_k: from the K most probable tokens; top_p: from the fewest most probable ones whose
        probabilities add up to it. vocabulary: that of the tokenizer, which may be smaller than the
        model's. A temperature of 0 takes the most probable token."""
        self.generator = torch.Generator().manual_seed(seed)
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.vocabulary = vocabulary

    def __call__(self, logits):
        logits = logits[: self.vocabulary].float().cpu()
        if self.temperature == 0:
            return logits.argmax().item()
        p, ids = (logits / self.temperature).softmax(-1).sort(descending=True, stable=True)
        p = p[: self.top_k]
        before = p.cumsum(-1) - p
        p = p.where(before < self.top_p, 0.0)  # the first one always stays
        return ids[torch.multinomial(p, 1, generator=self.generator)].item()


@torch.no_grad()
def generate(model, tokens, sampler):
    """tokens: those before -> tokens, one after the other, without end.

    A layer keeps the keys and values of the tokens so far. When the model's context is full, it
    continues from the last half of it."""
    c, device = model.c, next(model.parameters()).device
    seen, new, caches = [], list(tokens), None
    while True:
        if caches is None or len(seen) + len(new) > c.context:
            new, seen = seen + new, []
            if len(new) > c.context:
                new = new[-max(1, c.context // 2) :]
            caches = [Cache() for _ in model.blocks]
        inputs = torch.tensor([new], device=device)
        token = sampler(model.logits(inputs, caches, last=True)[0, 0])
        yield token
        seen, new = seen + new, [token]


def arguments(argv=None):
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("run", type=Path, help="--output of train.py, or one of its checkpoints")
    add("--prompt", default="", help="how the text begins; without one, as a document does")
    add("--tokens", type=whole(1), default=256, help="at most: a document may end before")
    add("--seed", type=whole(0, 2**63 - 1), default=0)
    add("--temperature", type=real(0), default=0.8, help="0: the most probable token each time")
    add("--top-k", type=whole(1), help="draw from the K most probable tokens")
    add(
        "--top-p",
        type=real(0, above=True),
        default=1.0,
        help="draw from the most probable tokens that have this probability together",
    )
    add("--device", choices=("cpu", "cuda"), help="without it cuda if the machine has a GPU")
    return parser.parse_args(argv)


def sample(args, out, say):
    """Writes the text to `out`, a binary file."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: torch sees no GPU here")
    # On a GPU as in training; TileMoE has no float32 there.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    of = trained.load(args.run, device, dtype)
    set_threads(plan.parameters(of.config)[1], torch.device(device))
    text = of.tokens
    say(f"{of.checkpoint}: {of.name} after {of.step:,} steps, on {device} in {str(dtype)[6:]}")
    write = lambda data: (out.write(data), out.flush())
    write(args.prompt.encode())
    sampler = Sampler(args.seed, args.temperature, args.top_k, args.top_p, text.vocabulary)
    # A document begins after the end of another one.
    before = [text.end, *text.encode(args.prompt)]
    decoded, drawn, began = text.decoder(), 0, time.monotonic()
    for token in generate(of.model, before, sampler):
        drawn += 1
        if token != text.end:
            write(decoded(token))
        if token == text.end or drawn == args.tokens:
            break
    write(b"\n")
    ended = ", to the end of a document" if token == text.end else ""
    say(f"{drawn} tokens{ended}; {drawn / (time.monotonic() - began):,.0f} tokens/s")


def main(argv=None):
    args = arguments(argv)
    try:
        sample(args, sys.stdout.buffer, lambda line: print(line, file=sys.stderr, flush=True))
    except Refusal as why:
        return f"error: {why}"
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
