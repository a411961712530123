"""Export a model of train.py to a checkpoint that transformers' from_pretrained loads.

    python examples/pretrain/export.py runs/tiny runs/tiny-transformers

The class is GraniteMoeSharedForCausalLM, which computes the same as the example's model in
evaluation: RMSNorm before each part, rotary embeddings, grouped-query attention without biases,
top-K experts by softmax over the chosen experts, a shared expert or none. Its multipliers are 1
here.
"""

import shutil
import sys
from pathlib import Path

import torch

import trained
from configs import Refusal
from corpus import END
from model import ROTARY_BASE
from options import Parser

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLASS = "GraniteMoeSharedForCausalLM"
OF_MODEL = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
OF_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "moe_norm.weight": "post_attention_layernorm.weight",
    "moe.gate.weight": "block_sparse_moe.router.weight",
    "moe.experts.gate_up_proj": "block_sparse_moe.experts.gate_up_proj",
    "moe.experts.down_proj": "block_sparse_moe.experts.down_proj",
    "shared.gate_up.weight": "shared_mlp.input_linear.weight",
    "shared.down.weight": "shared_mlp.output_linear.weight",
}


def refusal(name, c):
    """Return why a configuration has no equivalent in transformers, or None."""
    if c.selection_bias or c.scoring != "softmax_over_chosen":
        bias = " with a selection bias" if c.selection_bias else ""
        return f"{CLASS} requires softmax over the chosen experts, but {name} has {c.scoring}{bias}"
    return None


def config_of(c, end, transformers):
    """Return the GraniteMoeSharedConfig of a Config and the token that ends a document."""
    return transformers.GraniteMoeSharedConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.d,
        intermediate_size=c.n,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        max_position_embeddings=c.context,
        rms_norm_eps=torch.finfo(torch.float32).eps,  # default of torch.nn.RMSNorm
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        tie_word_embeddings=c.tied,
        num_local_experts=c.E,
        num_experts_per_tok=c.K,
        shared_intermediate_size=c.shared,
        attention_multiplier=c.head**-0.5,
        router_aux_loss_coef=c.balance_coefficient,
        bos_token_id=None,
        eos_token_id=end,
    )


def renamed(state, tied):
    """Convert the example's state dict to that of the class."""
    found = {}
    for name, value in state.items():
        part, _, rest = name.partition(".")
        if part in OF_MODEL:
            found[f"{OF_MODEL[part]}.{rest}"] = value
            continue
        number, _, inner = rest.partition(".")
        layer = f"model.layers.{number}"
        if inner == "attention.kv.weight":
            for letter, half in zip("kv", value.chunk(2)):
                found[f"{layer}.self_attn.{letter}_proj.weight"] = half.contiguous()
        else:
            found[f"{layer}.{OF_BLOCK[inner]}"] = value
    if tied:
        found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found


def tokenizer_of(text, c, transformers):
    """Return a tokenizer of transformers that gives the same tokens as the run's text."""
    import tokenizers  # transformers requires it

    inner = getattr(text, "tokenizer", None)
    if inner is None:
        inner = bytes_tokenizer(tokenizers, text.end)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        model_max_length=c.context,
        clean_up_tokenization_spaces=False,
    )


def bytes_tokenizer(tokenizers, end):
    """Return a tokenizer with byte b of UTF-8 as token b; `end` ends a document."""
    # The characters that ByteLevel uses for bytes: printable ones represent themselves.
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in own]
    vocabulary = {chr(byte): byte for byte in own}
    vocabulary |= {chr(0x100 + i): byte for i, byte in enumerate(others)} | {END: end}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END])
    return made


def export(run, output, dtype=torch.float32):
    """Write the model of a run's folder, or of one of its checkpoints, to `output`."""
    try:
        import transformers
    except ImportError:
        raise Refusal("export.py requires transformers; run pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    if output.exists():
        raise Refusal(f"{output} already exists; choose another folder")
    of = trained.load(run, dtype=dtype)
    why = refusal(of.name, of.config)
    if why is not None:
        raise Refusal(why)
    config = config_of(of.config, of.tokens.end, transformers)
    with torch.device("meta"):
        model = getattr(transformers, CLASS)(config)
    model.load_state_dict(renamed(of.model.state_dict(), of.config.tied), assign=True)
    model.tie_weights()
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer_of(of.tokens, of.config, transformers).save_pretrained(partial)
    partial.rename(output)  # the whole model exists, or nothing
    return model


def main(argv=None):
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("run", type=Path, help="--output of train.py, or one of its checkpoints")
    add("output", type=Path, help="a new folder")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the parameters in the files")
    args = parser.parse_args(argv)
    try:
        model = export(args.run, args.output, DTYPES[args.dtype])
    except Refusal as why:
        return f"error: {why}"
    print(f"{args.output}: {CLASS}, {model.num_parameters():,} parameters in {args.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
