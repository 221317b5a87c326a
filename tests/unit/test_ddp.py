"""What the adapter over torch.distributed does without ranks: names of models, memory of gradients, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dgc_horovod.compression import config_of
from dgc_horovod.errors import ConfigError, UnsupportedUse
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, register
from dgc_horovod.torch.ddp.models import bare
from dgc_horovod.torch.gradients.memory import TakenMemory


def test_without_a_process_group_it_says_what_to_do():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for call in (lambda: register(model, optimizer), lambda: DistributedOptimizer(optimizer)):
        with pytest.raises(UnsupportedUse, match=r"init_process_group\(\) before, and start the script with torchrun"):
            call()


def test_choices_of_compression():
    assert config_of(Compression.none) is config_of(Compression.fp16) is None
    assert config_of(Compression.dgc()).density == 0.001 and repr(Compression.fp16) == "Compression.fp16"
    with pytest.raises(UnsupportedUse, match="is for register"):
        Compression.none.compress(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"must be Compression\.none"):
        config_of(Compression.dgc)


def test_the_bare_model_is_inside_of_what_is_compiled():
    model = nn.Linear(3, 3)
    assert bare(torch.compile(model)) is model and bare(model) is model


def test_gradients_behind_one_another_share_a_memory_and_those_upon_one_another_do_not():
    memory, taken = torch.zeros(10), TakenMemory()
    assert taken.is_first_in(memory[:4]) and taken.is_first_in(memory[4:7])
    assert not taken.is_first_in(memory[6:]) and not taken.is_first_in(memory[:4].view(2, 2))
    taken.clear()
    assert taken.is_first_in(memory)
