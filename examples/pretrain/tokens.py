"""Convert a run's text to tokens and back.

The tokenizer of the corpus is stored in the run's folder, so that a trained model needs no corpus.
"""

import json
import shutil
from pathlib import Path

from configs import Refusal
from data import manifest_of

TOKENIZER = "tokenizer.json"


def keep(corpus, run):
    """Store tokens.json, and the corpus' tokenizer if it has one: without, a token is a byte."""
    described, source = manifest_of(corpus), Path(corpus) / TOKENIZER
    if source.exists():
        shutil.copyfile(source, run / TOKENIZER)
    kept = {
        "vocabulary": described["vocabulary"],
        "end": described["end"],  # token that ends a document
        "tokenizer": TOKENIZER if source.exists() else None,
    }
    (run / "tokens.json").write_text(json.dumps(kept) + "\n")


def of_run(run):
    """Return the ByteTokens or TokenizerTokens of a run."""
    path = Path(run) / "tokens.json"
    if not path.exists():
        raise Refusal(f"{path} is missing; run the training command of {run} again to write it")
    kept = json.loads(path.read_text())
    if kept["tokenizer"] is None:
        return ByteTokens(kept)
    return TokenizerTokens(kept, Path(run) / kept["tokenizer"])


class ByteTokens:
    """Tokens that are bytes of UTF-8."""

    def __init__(self, kept):
        self.vocabulary, self.end = kept["vocabulary"], kept["end"]

    def encode(self, text):
        return list(text.encode())

    def decoder(self):
        """Return a function from the next token to the bytes that are complete with it."""
        return lambda token: bytes([token])


class TokenizerTokens:
    """Tokens of Hugging Face's tokenizers."""

    def __init__(self, kept, path):
        try:
            import tokenizers
        except ImportError:
            raise Refusal("this run has a tokenizer; run pip install tokenizers") from None
        self.vocabulary, self.end = kept["vocabulary"], kept["end"]
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.tokenizer.encode_special_tokens = True  # in the corpus they are text, too
        self.stream = tokenizers.decoders.DecodeStream

    def encode(self, text):
        return self.tokenizer.encode(text).ids

    def decoder(self):
        """Return a function from the next token to the bytes that are complete with it.

        All bytes of a character that several tokens form come with the last of them.
        """
        stream = self.stream(skip_special_tokens=False)
        return lambda token: (stream.step(self.tokenizer, token) or "").encode()
