"""Sample text from a model of train.py in one process, on the GPU if the machine has one.

    python examples/pretrain/sample.py runs/tiny --prompt "The layer" --tokens 200 --seed 1

The text goes to stdout token by token, everything else to stderr.
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
    """Sampler of a token from logits (vocabulary); a seed gives the same tokens on a device."""

    def __init__(self, seed, temperature=1.0, top_k=None, top_p=1.0, vocabulary=None):
        """Set the distribution.

        Args:
            seed: Random seed.
            temperature: 0 selects the most probable token.
            top_k: Sample from the K most probable tokens.
            top_p: Sample from the fewest most probable tokens with this total probability.
            vocabulary: Vocabulary of the tokenizer, which may be smaller than the model's.
        """
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
    """Yield tokens one by one, without end; `tokens` are those before.

    A layer stores the keys and values of the tokens so far. When the model's context is full, it
    continues from the last half of it.
    """
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
    add("--prompt", default="", help="text to continue; default: the start of a document")
    add(
        "--tokens",
        type=whole(1),
        default=256,
        help="maximum number of tokens; a document may end earlier",
    )
    add("--seed", type=whole(0, 2**63 - 1), default=0)
    add("--temperature", type=real(0), default=0.8, help="temperature (0 = greedy)")
    add("--top-k", type=whole(1), help="sample from the K most probable tokens")
    add(
        "--top-p",
        type=real(0, above=True),
        default=1.0,
        help="sample from the most probable tokens with this total probability",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda if the machine has a GPU")
    return parser.parse_args(argv)


def sample(args, out, say):
    """Write the text to `out`, a binary file."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: torch finds no GPU (torch.cuda.is_available() is False)")
    # On a GPU as in training; TileMoE does not support float32 there.
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
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
