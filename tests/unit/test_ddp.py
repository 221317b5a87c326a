"""What the adapter over torch.distributed does without ranks: names of models, memory of gradients, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dgc_horovod.compression import config_of
from dgc_horovod.errors import CollectiveTimeout, ConfigError, LostRank, UnsupportedUse
from dgc_horovod.torch.ddp import Compression, DistributedOptimizer, register
from dgc_horovod.torch.ddp.models import bare
from dgc_horovod.torch.ddp.transport import Group, ProcessGroupCollectives
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
    with pytest.raises(UnsupportedUse, match=r"from dgc_horovod\.torch\.ddp import"):
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


@pytest.mark.parametrize(
    ("words", "ours", "is_lost"),
    [
        (
            "[unbound_buffer.cc:84] Timed out waiting 12000ms for recv operation",
            "waited 12 s for x:",
            False,
        ),
        ("[pair.cc:529] Application timeout caused pair closure", "waited 12 s for x or another collective", False),
        ("[pair.cc:534] Connection closed by peer [127.0.0.1]:4242", "x has failed, as another rank", True),
    ],
)
def test_a_time_limit_is_told_from_a_lost_rank_in_both_words_of_gloo(words, ours, is_lost):
    """Of two collectives under way the one that is asked for may be the one that the other's limit has closed."""
    error = ProcessGroupCollectives(Group([0], 0, None), "t", 12)._failed("x", RuntimeError(words))
    assert ours in str(error)
    assert isinstance(error, CollectiveTimeout) and isinstance(error, LostRank) == is_lost
