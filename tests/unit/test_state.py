"""What one rank keeps, as a record and as a file; and how it is handed on to another number of ranks."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgc_horovod.config import DGCConfig, whole_epoch
from dgc_horovod.errors import CheckpointError, DGCError
from dgc_horovod.exchange.hierarchical import Topology
from dgc_horovod.state import checkpoint, manifest
from dgc_horovod.state.parts import ADAM_UPDATES, check_kept, handed_on, needed, shares
from dgc_horovod.state.residual_state import ResidualState
from tests.helpers.saved import assert_equal, load, of_node, save, state_of
from tests.helpers.sealed import of_npz

WORKERS = st.integers(1, 12)


def owed(states: list[ResidualState], name: str, part: str) -> np.ndarray:
    """What all ranks owe the model of one tensor, in float64: their mean if gradients are averaged, else their sum."""
    parts = (part, "remainder") if part == "v" else (part,)
    tensors = [state.tensors[name] for state in states]
    total = np.sum([arrays[p].astype(np.float64) for arrays in tensors for p in parts if p in arrays], axis=0)
    return total / len(states) if states[0].averages else total


@given(before=WORKERS, after=WORKERS, averages=st.booleans())
def test_what_is_owed_does_not_change_with_the_number_of_ranks(before, after, averages):
    old = [state_of(rank, before, averages) for rank in range(before)]
    new = [
        handed_on({i: old[i] for i in shares(rank, after, before, averages)}, Topology(rank, after))
        for rank in range(after)
    ]
    for name, part in (("a", "v"), ("a", "u"), ("b", "v")):
        np.testing.assert_allclose(owed(new, name, part), owed(old, name, part), rtol=1e-5, atol=1e-6)
    if averages:  # as with local steps, whose slots are saved
        mean = [np.mean([state.tensors["b"]["first"] for state in states], axis=0) for states in (old, new)]
        np.testing.assert_allclose(*mean, rtol=1e-5, atol=1e-6)
    assert all((state.step, state.epoch, state.directions) == (7, 2, {"b": 4}) for state in new)
    assert all(state.second["a"].tobytes() == old[0].second["a"].tobytes() for state in new)


@given(
    nodes=st.integers(1, 4), size=st.sampled_from([1, 2, 3, 4]), new_nodes=st.integers(1, 4),
    new_size=st.sampled_from([1, 2, 3, 4]),
)  # fmt: skip
def test_what_is_owed_does_not_change_with_the_nodes(nodes, size, new_nodes, new_size):
    old = [of_node(rank, nodes * size, size) for rank in range(nodes * size)]
    places = [Topology(rank, new_nodes * new_size, new_size) for rank in range(new_nodes * new_size)]
    new = [handed_on({i: old[i] for i in needed(place, len(old), size)}, place) for place in places]
    for part in ("v", "u"):
        before = owed([state.as_one_of_all() for state in old], "a", part)
        if (nodes, size) == (new_nodes, new_size):
            assert all(one is other for one, other in zip(old, new, strict=True))
            continue
        of_nodes = [state.tensors["a"][part].astype(np.float64) for state in new[::new_size]]
        np.testing.assert_allclose(np.mean(of_nodes, axis=0), before, rtol=1e-5, atol=1e-6)


def test_a_manifest_that_may_not_be_on_the_disk_yet_takes_nothing_with_it(tmp_path, monkeypatch):
    """The files that it names had been removed, as those of a save that had failed."""
    save(tmp_path, 1, b"old", state_of(0, 1))
    see, seen = checkpoint._see_to_disk, []

    def fail_for_the_manifest(directory):
        seen.append(directory)
        if len(seen) == 3:  # behind the model and the rank's file
            raise OSError(5, "Input/output error")
        see(directory)

    monkeypatch.setattr(checkpoint, "_see_to_disk", fail_for_the_manifest)
    save(tmp_path, 2, b"new", state_of(0, 1))
    found = load(tmp_path)
    assert (found.model, found.state.step) == (b"new", 2)
    assert len(list(tmp_path.glob("*.bin"))) == 2, "after a crash the manifest of before may be there again"
    save(tmp_path, 3, b"newer", state_of(0, 1))
    assert load(tmp_path).state.step == 3 and len(list(tmp_path.glob("*.bin"))) == 1


def test_a_record_of_a_slice_survives_its_file_and_lies_about_nothing():
    state = of_node(1, 4, 2)
    assert_equal(ResidualState.from_bytes(state.to_bytes()), state)
    for runs in ({"a": [8, 12]}, {"a": [-1, 12]}, {"a": [0]}, {"a": [0, 3]}):
        with pytest.raises(CheckpointError):
            ResidualState.from_bytes(dataclasses.replace(state, runs=runs).to_bytes())
    with pytest.raises(CheckpointError):
        ResidualState.from_bytes(dataclasses.replace(state, node_size=3).to_bytes())


def test_pairs_are_averaged_and_single_ranks_copied():
    assert shares(0, 2, 4, averages=True) == {0: 0.5, 1: 0.5}
    assert shares(3, 4, 2, averages=True) == {1: 1.0}
    assert shares(0, 2, 4, averages=False) == {0: 1.0, 1: 1.0}
    assert shares(3, 4, 2, averages=False) == {1: 0.5}


def test_a_save_replaces_the_one_before_and_nothing_else(tmp_path):
    for name in ("mine.txt", "dgc-train.log", "dgc-0123abcd-mine.pt"):
        (tmp_path / name).write_text("kept")
    (tmp_path / "dgc-horovod").mkdir()
    for step in (1, 2):
        state = dataclasses.replace(state_of(0, 1), step=step)
        save(tmp_path, step, b"model", state)
    assert len(list(tmp_path.iterdir())) == 3 + 4, "manifest, model, residuals, and what was there before"
    found = load(tmp_path)
    assert found.manifest.step == 2 and found.model == b"model"
    assert_equal(found.state, state)


def test_an_interrupted_save_leaves_the_one_before(tmp_path, monkeypatch):
    save(tmp_path, 7, b"model", state_of(0, 1))
    put, written = checkpoint._put, []

    def fails_at_the_manifest(directory, name, data):
        if name == manifest.MANIFEST:
            raise OSError("disk full")
        written.append(name)
        put(directory, name, data)

    monkeypatch.setattr(checkpoint, "_put", fails_at_the_manifest)
    with pytest.raises(CheckpointError, match="rank 0: OSError: disk full"):
        save(tmp_path, 8, b"other", state_of(0, 1, seed=5))
    assert len(written) == 2 and not any((tmp_path / name).exists() for name in written), "a full disk stays full"
    monkeypatch.undo()
    assert load(tmp_path).model == b"model"
    (tmp_path / "dgc-0123abcd-rank7.npz").write_bytes(b"of one that was killed")
    save(tmp_path, 9, b"third", None)
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".bin", ".json"], "what was left behind is gone"


def test_a_checkpoint_of_another_optimizer_is_not_replaced(tmp_path):
    save(tmp_path, 1, b"generator", None, holds="generator")
    with pytest.raises(CheckpointError, match="of another optimizer"):
        save(tmp_path, 1, b"discriminator", None, holds="discriminator")
    assert load(tmp_path, None).model == b"generator"


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    inside = tmp_path / "checkpoint"
    save(inside, 7, b"model", None)
    found = manifest.Manifest.from_bytes((inside / manifest.MANIFEST).read_bytes())
    file = found.files["model"]
    (tmp_path / "outside").write_bytes(b"model")
    changed = dataclasses.replace(found, files={"model": dataclasses.replace(file, name="../outside")})
    (inside / manifest.MANIFEST).write_bytes(changed.to_bytes())
    with pytest.raises(CheckpointError, match=r"files\.model\.name must be the name of a file in its directory"):
        load(inside, None)


@pytest.mark.parametrize("changes", [pytest.param(1_000, marks=pytest.mark.slow), 100])
def test_changed_files_are_refused_or_read_as_they_were(tmp_path, changes):
    """Every change to the manifest or to a residual file ends in CheckpointError, or changes nothing."""
    state = state_of(0, 1)
    save(tmp_path, 7, b"the model", state)
    files, rng, outcomes = sorted(tmp_path.iterdir()), np.random.default_rng(0), set()
    for number in range(changes):
        file = files[number % len(files)]
        sound = file.read_bytes()
        file.write_bytes(_changed(sound, rng))
        try:
            found = load(tmp_path)
            assert_equal(found.state, state)
            assert found.model == b"the model" and found.manifest.step == 7
            outcomes.add("sound")
        except CheckpointError:
            outcomes.add("refused")
        file.write_bytes(sound)
    assert "refused" in outcomes


@pytest.mark.parametrize("changes", [pytest.param(20_000, marks=pytest.mark.slow), 500])
def test_changed_records_behind_the_digest_are_refused_or_valid(changes):
    """As if the digest had been forged: what reads the bytes must bear anything."""
    sound, rng = state_of(0, 1).to_bytes(), np.random.default_rng(1)
    for _ in range(changes):
        try:
            state = ResidualState.from_bytes(_changed(sound, rng))
        except DGCError:
            continue
        assert 0 <= state.rank < state.workers and state.step >= 0
        for arrays in state.tensors.values():
            assert all(x.dtype == np.float32 and x.ndim == 1 for x in arrays.values())
            assert all(np.isfinite(x).all() for part, x in arrays.items() if part != "second")


def _changed(data: bytes, rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    kind = rng.integers(4)
    if kind == 0:
        return bytes(changed[: int(rng.integers(len(changed)))])
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(max(1, len(changed) - 9)))
        if kind == 1:
            changed[at] ^= 1 << int(rng.integers(8))
        elif kind == 2:
            changed[at] = int(rng.integers(256))
        else:
            del changed[at : at + int(rng.integers(1, 9))]
    return bytes(changed)


def test_an_array_of_no_tensor_is_refused():
    """An IndexError had come out."""
    for key, dtype in (("7.v", np.float32), ("7.thresholds", np.float64), ("-9.v", np.float32)):
        changed = of_npz(lambda head, arrays: arrays.update({key: np.ones(3, dtype)}))(state_of(0, 1).to_bytes())  # noqa: B023
        with pytest.raises(CheckpointError, match="damaged"):
            ResidualState.from_bytes(changed)


@pytest.mark.parametrize(("part", "value", "loads"), [("second", np.inf, True), ("second", np.nan, False),
                                                      ("first", np.inf, False), ("v", np.inf, False)])  # fmt: skip
def test_what_a_square_has_overflowed_to_is_loaded_again(part, value, loads):
    """Adam's second moment after a gradient of 2e19 was saved, and could never be loaded."""
    state = state_of(0, 1)
    state.tensors["b"][part][1] = value
    if loads:
        assert_equal(ResidualState.from_bytes(state.to_bytes()), state)
    else:
        with pytest.raises(CheckpointError, match="finite"):
            ResidualState.from_bytes(state.to_bytes())


@pytest.mark.parametrize("epoch", [2, 2.0, np.int64(2), np.float32(2), np.array(2)], ids=repr)
def test_an_epoch_may_be_any_kind_of_number(tmp_path, epoch):
    """2.0 was saved and then refused, NumPy's 2 could not be saved."""
    state = dataclasses.replace(state_of(0, 1), epoch=whole_epoch(epoch))
    save(tmp_path, 7, b"model", state)
    found = load(tmp_path)
    assert found.state.epoch == 2 == found.manifest.epoch and type(found.state.epoch) is int
    assert ResidualState.from_dict(state.to_dict()).epoch == 2
    with pytest.raises(CheckpointError):
        ResidualState.from_dict({**state.to_dict(), "epoch": "2"})


def test_pickled_arrays_are_refused():
    out = io.BytesIO()
    np.savez(out, head=np.array([{"a": 1}], dtype=object))
    with pytest.raises(CheckpointError, match="damaged"):
        ResidualState.from_bytes(out.getvalue())


def test_nothing_is_lost_without_a_word_where_nothing_is_compressed(tmp_path, caplog):
    """What waited, and momentum, were dropped though residuals were required."""
    state = state_of(0, 1)
    save(tmp_path, 7, b"model", state)
    with pytest.raises(CheckpointError, match="nothing is compressed now: flush\\(\\) before saving, or residuals="):
        load(tmp_path, None)
    assert load(tmp_path, None, checkpoint.IGNORED).model == b"model" and not caplog.text
    assert load(tmp_path, None, checkpoint.IF_SOUND).model == b"model"
    parts = ("v", "u", "remainder")
    norm = np.sqrt(sum((x.astype(float) ** 2).sum() for n in "ab" for p, x in state.tensors[n].items() if p in parts))
    assert f"of 2 parameters are dropped; their norm over all ranks is {norm:.3g}" in caplog.text
    caplog.clear()
    flushed = {name: {"v": 0 * arrays["v"]} for name, arrays in state.tensors.items()}
    state.second = {}
    save(tmp_path, 8, b"flushed", dataclasses.replace(state, tensors=flushed))
    assert load(tmp_path, None).model == b"flushed" and not caplog.text
    # of small tensors Adam keeps what coding has left, behind a flush too
    left = {**flushed, "a": {"v": np.full(5, 1e-3, np.float32)}}
    save(tmp_path, 9, b"Adam", dataclasses.replace(state, tensors=left, method=ADAM_UPDATES))
    assert load(tmp_path, None).model == b"Adam" and not caplog.text


def test_another_method_is_refused_in_words(tmp_path):
    save(tmp_path, 7, b"model", state_of(0, 1))
    other = DGCConfig(momentum_correction=False, factor_masking=False)
    with pytest.raises(CheckpointError, match="momentum_correction=True, and it is False now; call flush"):
        load(tmp_path, other)
    assert load(tmp_path, other, checkpoint.IGNORED).state.tensors == {}
    assert json.loads((tmp_path / manifest.MANIFEST).read_text())["config"]["density"] == "0.001"


def test_residuals_of_another_method_are_refused():
    arrays = {"v": np.ones(5, np.float32), "u": np.ones(5, np.float32)}
    state = ResidualState(0, 1, True, 7, None, {"a": arrays}, method="gradients")
    assert ResidualState.from_bytes(state.to_bytes()).method == "gradients"
    for method in (ADAM_UPDATES, "changes of weights"):
        with pytest.raises(CheckpointError, match=f"hold gradients, and this optimizer's hold {method}"):
            check_kept(state, method)
    check_kept(state, "gradients")
    flushed = {"a": {"v": 0 * arrays["v"]}}
    check_kept(dataclasses.replace(state, tensors=flushed), ADAM_UPDATES)
    check_kept(dataclasses.replace(state, method=""), ADAM_UPDATES)  # of earlier versions
    old = {name: value for name, value in state.to_dict().items() if name != "method"}
    assert ResidualState.from_dict(old).method == ""
