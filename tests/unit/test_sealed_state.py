"""A checkpoint whose digests fit and whose fields do not: one error that names file and field, nothing is changed."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dgc_horovod.errors import CheckpointError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.planning import trial
from dgc_horovod.state import manifest
from dgc_horovod.state.parts import handed_on
from dgc_horovod.state.residual_state import EARLIER_FP16, MODES, UNDECIDED, ResidualState
from tests.helpers.saved import assert_equal, load, of_node, save, state_of
from tests.helpers.sealed import GONE, JUNK, of_npz, places, replaced, there

MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
EARLIER = {"node_size", "mode", "clips", "method", "runs", "second"}  # unknown to earlier versions
CLIPS = [[["a"], 0.5, 2.0, False], [["a", "b"], 1.0, None, True]]


def state() -> ResidualState:
    made = state_of(0, 1)
    made.clips = CLIPS
    made.runs = {"a": [0, 5]}
    return made


def is_refused(before: Any, junk: Any, path: tuple[Any, ...]) -> bool:
    """Whether `junk` in the place of `before` can be nothing that a save has written."""
    if junk is GONE:
        return path[0] not in EARLIER and len(path) == 1
    if type(before) in (dict, list, str, bool):
        return type(junk) is not type(before) or junk == "\ud800"
    if path[0] == "epoch":
        return type(junk) in (bool, str, list, dict) or junk in (0.5, 2**80, -(2**80), 10**400) or junk != junk
    if type(before) is int and path[0] not in ("measured", "clips"):
        return type(junk) is not int and junk is not None
    return type(junk) in (str, list, dict, bool)


def junk_in_head(sound: bytes, data: Any, junk: Any) -> tuple[bytes, tuple[Any, ...], Any]:
    """An ``.npz`` file with `junk` somewhere in its head; the path, and what stood there."""
    where: list[Any] = []

    def change(head: dict[str, Any], arrays: dict[str, Any]) -> None:
        path = data.draw(st.sampled_from(list(places(head))))
        where.extend((path, there(head, path)))
        made = replaced(head, path, junk)
        head.clear()
        head.update(made)

    return of_npz(change)(sound), *where


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sealed")
    save(made, 7, b"the model", state())
    return made


@MANY
@given(data=st.data(), junk=st.sampled_from(JUNK))
def test_a_manifest(folder, data, junk):
    file = folder / manifest.MANIFEST
    sound = file.read_text()
    body = json.loads(sound)
    del body["digest"], body["dgc_horovod"]
    path = data.draw(st.sampled_from(list(places(body))))
    before = there(body, path)
    changed = replaced(body, path, junk)
    file.write_text(json.dumps({**changed, "digest": manifest.digest(json.dumps(changed, sort_keys=True).encode())}))
    try:
        found = load(folder)
        assert not is_refused(before, junk, path), f"{path}: {junk!r} was taken for {before!r}"
        assert found.manifest.step == 7
    except CheckpointError as error:
        if path[0] not in ("config", "files"):  # of which some texts and numbers are possible, and those of another
            assert manifest.MANIFEST in str(error) and path[0] in str(error), f"{path} is not named: {error}"
    finally:
        file.write_text(sound)


@MANY
@given(data=st.data(), junk=st.sampled_from(JUNK))
def test_the_head_of_a_record(data, junk):
    sealed, path, before = junk_in_head(state().to_bytes(), data, junk)
    try:
        found = ResidualState.from_bytes(sealed, "rank0.npz")
        assert not is_refused(before, junk, path), f"{path}: {junk!r} was taken for {before!r}"
        ResidualState.from_bytes(found.to_bytes())
    except CheckpointError as error:
        assert "rank0.npz" in str(error), error
        assert path[0] in str(error) or path[0] in ("names", "buckets"), f"{path} is not named: {error}"


ARRAYS = {
    "another dtype": lambda x: x.astype(np.float16), "integers": lambda x: x.astype(np.int64),
    "two dimensions": lambda x: x.reshape(1, -1), "a number": lambda x: np.float32(1),
    "NaN": lambda x: np.full_like(x, np.nan), "texts": lambda x: np.array(["a"] * x.size),
}  # fmt: skip


@pytest.mark.parametrize("change", ARRAYS)
@pytest.mark.parametrize("part", ["v", "u", "remainder", "first", "second", "thresholds"])
def test_an_array(part, change):
    key = {"first": "1.first", "second": "1.second"}.get(part, f"0.{part}")
    sealed = of_npz(lambda head, arrays: arrays.update({key: ARRAYS[change](arrays[key])}))(state().to_bytes())
    with pytest.raises(CheckpointError, match=rf"rank0.npz is damaged: array '{key}' must be"):
        ResidualState.from_bytes(sealed, "rank0.npz")
    if part != "thresholds":  # `OptimizerExchange.load` failed with half of it loaded
        record, name = state().to_dict(), "b" if part in ("first", "second") else "a"
        record["tensors"][name][part] = ARRAYS[change](record["tensors"][name][part])
        with pytest.raises(CheckpointError, match="no dict of residual_state_dict"):
            ResidualState.from_dict(record)


def test_what_is_owed_goes_with_a_residual():
    """A KeyError, on one rank alone, when it was handed on to another number of ranks."""
    sealed = of_npz(lambda head, arrays: arrays.pop("0.v"))(state().to_bytes())
    with pytest.raises(CheckpointError, match="'remainder' of 'a' must go with as many elements of 'v'"):
        ResidualState.from_bytes(sealed)


def test_records_of_different_models_are_not_handed_on():
    """A residual of one element had been spread over all."""
    one, other = of_node(0, 2, 1), of_node(1, 2, 1)
    other.tensors["a"] = {part: x[:1] for part, x in other.tensors["a"].items()}
    with pytest.raises(CheckpointError, match="has 1 elements in the record of rank 1, and 12 in those before"):
        handed_on({0: one, 1: other}, Topology(0, 1))


def test_modes_are_those_of_a_trial():
    assert set(MODES) == {"", UNDECIDED, EARLIER_FP16, trial.DENSE, trial.COMPRESSED}


@MANY
@given(data=st.data(), junk=st.sampled_from(JUNK))
def test_a_dict(data, junk):
    sound = state().to_dict()
    path = data.draw(st.sampled_from(list(places(sound))))
    before = there(sound, path)
    is_array = isinstance(before, np.ndarray)
    try:
        ResidualState.from_dict(replaced(sound, path, junk))
        assert is_array is (junk is GONE) or not is_refused(before, junk, path), f"{path}: {junk!r} for {before!r}"
    except CheckpointError as error:
        assert "this is no dict of residual_state_dict()" in str(error), error
        assert str(path[0]) in str(error) or path[0] == "tensors", (path, error)


OTHERS = ({"colour": "red"}, {"tensors": {"b": {"w": np.ones(3, np.float32)}}})
NO_DICTS = [None, [], "text", {}, {"rank": 0}, *({**state().to_dict(), **other} for other in OTHERS)]


@pytest.mark.parametrize("record", NO_DICTS, ids=range(len(NO_DICTS)))
def test_what_is_no_dict_of_ours(record):
    torch_state = pytest.importorskip("dgc_horovod.torch.state")
    for read in (ResidualState.from_dict, torch_state.from_dict):
        with pytest.raises(CheckpointError, match="this is no dict of residual_state_dict"):
            read(record)


def test_tensors_of_a_dict():
    torch = pytest.importorskip("torch")
    from dgc_horovod.torch import state as torch_state

    sound = torch_state.to_dict(state())
    assert_equal(torch_state.from_dict(sound), state())
    vector = torch.ones(5)
    for odd in (vector.bfloat16(), vector.int(), vector.view(1, 5), vector * torch.nan, vector.to_sparse(), [1.0] * 5):
        with pytest.raises(CheckpointError, match=r"tensors\b.*must be"):
            torch_state.from_dict(replaced(sound, ("tensors", "a", "v"), odd))


# -- the model's file


def _trained(torch: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    _step(torch, model, optimizer)
    return model, optimizer


def _step(torch: Any, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()


@MANY
@given(data=st.data(), junk=st.sampled_from([*JUNK, "tensor", "matrix"]))
def test_the_file_of_a_torch_model(data, junk):
    torch = pytest.importorskip("torch")
    from dgc_horovod.torch import state

    junk = {"tensor": torch.ones(7), "matrix": torch.ones(2, 9)}.get(junk, junk) if isinstance(junk, str) else junk
    model, optimizer = _trained(torch)
    sound = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "extra": {"epoch": 7}}
    path = data.draw(st.sampled_from(list(places(sound))))
    out = io.BytesIO()
    torch.save(replaced(sound, path, junk), out)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    try:
        with state.put_back_on_error(model):
            saved = state.read("model.bin", out.getvalue())
            state.load_model("model.bin", saved, model)
            state.check_fits("model.bin", saved, optimizer)
    except CheckpointError as error:
        assert "model.bin" in str(error) and (str(path[0]) in str(error) or path[0] == "extra"), (path, error)
        assert str([model.state_dict(), optimizer.state_dict()]) == str(before), "something was changed"
        return
    optimizer.load_state_dict(saved["optimizer"])
    if junk is not True:  # a flag is one, but not every optimizer can do what it says
        _step(torch, model, optimizer)
    assert dict(saved["extra"]) is not None


def test_a_model_with_names_of_before_is_loaded_by_its_own_hook():
    """What torch would load fits: a key that a hook renames, a step that is a number, a flag that was not known."""
    torch = pytest.importorskip("torch")
    from dgc_horovod.torch import state

    model, optimizer = _trained(torch)
    saved = {"model": dict(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict()), "extra": {}}
    saved["model"]["first.weight"] = saved["model"].pop("0.weight")
    for each in saved["optimizer"]["state"].values():
        each["step"] = int(each["step"])
    for group in saved["optimizer"]["param_groups"]:
        del group["fused"]
        group["foreach"], group["initial_lr"] = True, 0.1
    with pytest.raises(CheckpointError, match=r"0\.weight"):
        state.load_model("model.bin", copy.deepcopy(saved), model)
    model.register_load_state_dict_pre_hook(
        lambda module, found, *more: found.update({"0.weight": found.pop("first.weight")})
    )
    state.load_model("model.bin", saved, model)
    state.check_fits("model.bin", saved, optimizer)


ODD_BYTES = [np.ones(3), np.ones(5, np.uint8), np.ones((1, 24), np.uint8), np.array("text")]


@MANY
@given(data=st.data(), junk=st.sampled_from([*JUNK, "array"]))
def test_the_file_of_a_keras_model(data, junk):
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("horovod.tensorflow")
    from dgc_horovod.tensorflow import state as keras_state

    variables, outer = [tf.Variable(tf.ones((2, 3))), tf.Variable(7, dtype=tf.int64)], [tf.Variable(tf.zeros(3))]
    sound = keras_state._dumped(variables, outer, {"trained": [0, -1], "exchanged": [0]}, {"epoch": 7})
    if junk == "array":
        key, odd = (data.draw(st.sampled_from(each)) for each in (["0", "1", "2"], ODD_BYTES))
        sealed, where = of_npz(lambda head, arrays: arrays.update({key: odd}))(sound), ("array",)
    else:
        sealed, where, _ = junk_in_head(sound, data, junk)
    try:
        saved = keras_state._Saved.read("model.bin", sealed)
        saved.check(variables, outer)
    except CheckpointError as error:
        assert "model.bin" in str(error) or "of another model" in str(error), (where, error)
        return
    assert where != ("array",), "it was taken"
    saved.assign(variables, outer, 1)
    assert [variable.numpy().tolist() for variable in variables] == [[[1.0] * 3] * 2, 7]
    assert dict(saved.head["extra"]) is not None
