"""What memory and GPUs there are, and what is said when they do not do."""

import pytest

from experiments.runtime import memory


def test_gpus_are_those_before_the_first_that_is_none(monkeypatch):
    for variable, gpus in {
        "": [], "-1": [], "NoDevFiles": [], "0,1": ["0", "1"], " 3, 5 ": ["3", "5"], "0,-1,2": ["0"],
        "GPU-8a1f,MIG-2": ["GPU-8a1f", "MIG-2"],
    }.items():  # fmt: skip
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert memory.visible_gpus() == gpus, variable


def test_out_of_memory_never_asks_for_what_just_failed():
    for samples, advice in ((9, "type train.micro_batch=4 "), (1, "with one sample: take a smaller size=")):
        with pytest.raises(memory.MemoryLimit, match=advice), memory.out_of_memory(samples):
            raise RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="^something else$"), memory.out_of_memory(1):
        raise RuntimeError("something else")
