"""Names of other packages that they may drop (tilemoe._private): each is probed once, and if one is
missing, the feature is refused by an error with the name, while everything else works."""

import importlib
import warnings
from importlib import metadata

import pytest
import torch

from checks import python
from tilemoe import _private

PULL = "expert parallelism with dispatch='pull' on GPUs"
EXPERT_PARALLEL = "TileMoE's expert parallelism in transformers"
QUANTIZED = "quantised experts in transformers"
TORCHTITAN = "tilemoe.torchtitan"
GPT_OSS = "TileMoE for torchtitan's gpt-oss"
BY_BUFFERS = {
    "TileMoE with torchtitan's DeepEP dispatcher": ("of_deepep", "deepep"),
    "TileMoE with torchtitan's HybridEP dispatcher": ("of_hybridep", "hybridep"),
}


@pytest.fixture(autouse=True)
def not_probed(monkeypatch):
    monkeypatch.setattr(_private, "_found", set())


def names(*features):
    return [(feature, name) for feature in features for name in _private.FEATURES[feature]]


def each(*features):
    found = names(*features)
    return pytest.mark.parametrize("feature, name", found, ids=[name for _, name in found])


def need(name):
    package = name.partition(".")[0].partition(":")[0]
    pytest.importorskip(package, reason=f"{package} is not installed")
    if name.startswith("transformers.distributed.expert_parallel"):
        pytest.importorskip(
            "transformers.distributed.expert_parallel", reason="transformers has none before 5.23"
        )


@each(PULL, QUANTIZED, TORCHTITAN, EXPERT_PARALLEL)
def test_the_tested_versions_have_it(feature, name):
    need(name)
    assert _private._has(name)


def without(monkeypatch, name):
    """Hides the name: as in a version that dropped it."""
    has = _private._has
    monkeypatch.setattr(_private, "_has", lambda other: other != name and has(other))


def removed(monkeypatch, name):
    """Removes the name itself."""
    module, _, attributes = name.partition(":")
    owner = importlib.import_module(module)
    *path, last = attributes.split(".")
    for attribute in path:
        owner = getattr(owner, attribute)
    if last in vars(owner):
        monkeypatch.delattr(owner, last)
        return not hasattr(owner, last)  # a base class may have it, too
    return False


@each(PULL, QUANTIZED, TORCHTITAN, EXPERT_PARALLEL)
def test_a_removed_name_is_found_missing(feature, name, monkeypatch):
    need(name)
    try:
        gone = removed(monkeypatch, name)
    except TypeError:  # of a type of C++
        gone = False
    if not gone:
        without(monkeypatch, name)
    absent = name.replace(":", ".")
    assert absent in _private.missing(feature)
    with pytest.raises(NotImplementedError) as error:
        _private.require(feature)
    package = absent.partition(".")[0]
    version = metadata.version(package)
    assert f"{feature} requires " in str(error.value) and absent in str(error.value)
    assert f"missing in {package} {version}, which" in str(error.value)


def test_a_feature_is_probed_once(monkeypatch):
    _private.require(PULL)
    monkeypatch.setattr(_private, "_has", lambda name: pytest.fail("probed again"))
    _private.require(PULL)


@each(PULL)
def test_pull_is_refused(feature, name, monkeypatch):
    from tilemoe.distributed.pull import _Link

    without(monkeypatch, name)
    with pytest.raises(NotImplementedError, match=name.replace(":", ".")):
        _Link(None, torch.device("cuda"))


@each(QUANTIZED)
def test_register_warns_and_registers_the_rest(feature, name, monkeypatch):
    need(name)
    import tilemoe.transformers

    without(monkeypatch, name)
    with pytest.warns(UserWarning, match=name.replace(":", ".")):
        tilemoe.transformers.register("another")
    from tilemoe.integrations.transformers import is_tilemoe

    assert is_tilemoe("another")


@each(EXPERT_PARALLEL)
def test_expert_parallelism_of_transformers_is_refused(feature, name, monkeypatch):
    need(name)
    import tilemoe.transformers
    from transformers.distributed.expert_parallel import EPImplementationInterface

    without(monkeypatch, name)
    tilemoe.transformers.register("another")
    with pytest.raises(NotImplementedError, match=name.replace(":", ".")):
        EPImplementationInterface()["another"](None, None, None)
    monkeypatch.undo()
    tilemoe.transformers.register("another")
    assert EPImplementationInterface()["another"].__name__ == "TileMoEEP"


def test_without_the_interface_of_expert_parallelism(monkeypatch):
    need("transformers.distributed.expert_parallel")
    import tilemoe.transformers
    from transformers.distributed import expert_parallel

    monkeypatch.delattr(expert_parallel, "EPImplementationInterface")
    with pytest.warns(UserWarning, match="EPImplementationInterface.register, missing in"):
        tilemoe.transformers.register("another")


def test_register_warns_of_nothing_on_the_tested_versions():
    pytest.importorskip("transformers", reason="transformers is not installed")
    import tilemoe.transformers

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tilemoe.transformers.register()


@pytest.mark.parametrize(
    "name", [_private.FEATURES[TORCHTITAN][i].replace(":", ".") for i in (0, 2, 3)]
)
def test_torchtitan_is_refused_at_import(name):
    need("torchtitan")
    module, _, attribute = name.partition(".GroupedExperts")[0].rpartition(".")
    if name.endswith("GroupedExperts.Config"):
        module, attribute = module + "." + attribute, "GroupedExperts"
    program = (
        f"import importlib; delattr(importlib.import_module({module!r}), {attribute!r})\n"
        "import tilemoe\n"
        "try: import tilemoe.torchtitan\n"
        "except ImportError as error: print(error)"
    )
    printed = python("-c", program)
    assert "tilemoe.torchtitan requires torchtitan." in printed and name in printed, printed


@pytest.mark.parametrize("name", _private.FEATURES[GPT_OSS])
def test_gpt_oss_of_torchtitan_is_refused(name, monkeypatch):
    need(name)
    import tilemoe.torchtitan

    without(monkeypatch, name)
    kind = type("Config", (), {})
    kind.__module__ = "torchtitan.models.gpt_oss.moe"
    kind.__qualname__ = "GptOssGroupedExperts.Config"
    with pytest.raises(NotImplementedError, match=name.replace(":", ".")):
        tilemoe.torchtitan.experts(kind())


@each(*BY_BUFFERS)
def test_dispatchers_with_buffers_are_refused(feature, name, monkeypatch):
    need("torchtitan")
    from tilemoe.integrations import torchtitan_dispatchers

    monkeypatch.setattr(_private, "_has", lambda other: other != name)
    function = getattr(torchtitan_dispatchers, BY_BUFFERS[feature][0])
    with pytest.raises(NotImplementedError, match=name.replace(":", ".")):
        function(None, None, None, None, None)


def test_import_needs_none_of_them():
    """`import tilemoe` imports no module of the list."""
    modules = {name.partition(":")[0] for _, name in names(*_private.FEATURES)}
    modules -= {"torch", "torch._C._distributed_c10d"}
    loaded = python("-c", "import sys, tilemoe; print(*sys.modules)").split()
    assert not modules & {*loaded}
