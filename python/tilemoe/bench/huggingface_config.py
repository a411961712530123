"""Read the sizes of a Hugging Face model's Mixture-of-Experts layers from its config.json.

transformers is not required.
"""

import json
import pathlib

NESTED = ("text_config", "ffn_config")  # of multimodal models; of dbrx
# Required values, each with its names in configs; the first name that is present counts.
KEYS = {
    "d": ("hidden_size", "d_model"),
    "n": ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size"),
    "E": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "K": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
}
MEANING = {"d": "hidden size", "n": "intermediate size", "E": "experts", "K": "experts per token"}
ACTIVATIONS = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh", "relu": "reglu",
}  # fmt: skip


def read(path):
    """Return `sizes` of the config.json at a path, or in the folder at a path.

    Args:
        path: File or folder.
    """
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, got {type(config).__name__}")
        return sizes(config, config.get("model_type") or path.resolve().parent.name)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"--config {path}: not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None


def sizes(config, model):
    """Return the sizes {"d", "n", "E", "K"}, the activation, the model's name, and a note or None.

    The note describes what the bench ignores.

    Args:
        config: The parsed config.json.
        model: Name of the model.

    Raises:
        ValueError: The config is not that of a Mixture-of-Experts model; the message names the
            missing keys.
    """
    for name in NESTED:
        if isinstance(config.get(name), dict):
            config = config | config[name]

    found = {size: next((config[key] for key in keys if config.get(key) is not None), None)
             for size, keys in KEYS.items()}  # fmt: skip
    if lacking := [size for size, value in found.items() if value is None]:
        missing = "; ".join(f"{' or '.join(KEYS[size])} ({MEANING[size]})" for size in lacking)
        kind = "not a Mixture-of-Experts model: " if "E" in lacking else ""
        raise ValueError(f"{kind}the model {model!r} has no {missing}")
    for size, value in found.items():
        if not isinstance(value, int) or isinstance(value, bool):
            key = next(key for key in KEYS[size] if config.get(key) is not None)
            raise ValueError(f"{key} must be one number, got {value!r}")
    act = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if act not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise ValueError(f"hidden_act must be one of {names}, got {act!r}")
    note = None
    if model == "gpt_oss":
        note = "gpt_oss is measured as plain SwiGLU, without its biases and its clamp"
    elif config.get("n_shared_experts") or config.get("shared_expert_intermediate_size"):
        note = f"{model} is measured without its shared experts"
    return found, ACTIVATIONS[act], model.replace("_", "-"), note
