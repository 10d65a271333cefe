"""`tz.mesh`, and boxes of parameters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import terrazzo as tz
from terrazzo.engine import Box
from terrazzo.parallel import mesh_sizes
from tests.helpers.threads import run_in_threads


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({}, {"dp_shard": 8}),
        ({"tp": 2}, {"dp_shard": 4, "tp": 2}),
        ({"tp": 8}, {"dp_shard": 1, "tp": 8}),
        ({"cp": 2, "tp": 2, "dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 2}),
        ({"tp": 2, "dp_shard": 4}, {"dp_shard": 4, "tp": 2}),
    ],
)
def test_dp_shard_is_what_the_other_axes_leave(given, sizes):
    assert list(mesh_sizes(given, 8).items()) == list(sizes.items())


@pytest.mark.parametrize("given", [{"tp": 3}, {"tp": 2, "dp_shard": 2}, {"tp": 16}])
def test_a_product_that_is_not_the_world_names_what_was_given(given):
    with pytest.raises(tz.BadInput, match=rf"tp {given['tp']}.* does not make up the 8 ranks") as told:
        mesh_sizes(given, 8)
    edit = "Leave dp_shard out, which takes what the others leave, and choose" if "dp_shard" in given else "Choose"
    assert f"must be 8. {edit} others whose product divides 8; or start" in str(told.value)


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2"])
def test_a_size_counts_ranks(size):
    with pytest.raises(tz.BadInput, match=r"The mesh axis tp is .*give an int"):
        mesh_sizes({"tp": size}, 8)


def test_a_mesh_needs_a_process_group():
    with pytest.raises(tz.Misuse, match="init_process_group"):
        tz.mesh(tp=2)


def test_neighbouring_ranks_share_tp_and_a_mesh_is_made_once():
    def of(rank):
        made = tz.mesh(tp=2, device="cpu")
        assert made is tz.mesh(tp=2, device="cpu")
        assert tz.mesh(device="cpu") is tz.mesh(device="cpu")
        return [dist.get_process_group_ranks(made.get_group(axis)) for axis in ("dp_shard", "tp")]

    assert run_in_threads(4, of) == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def test_a_box_of_a_fused_matrix_has_a_part_of_each():
    whole = torch.arange(48.0).view(12, 4)
    box = Box.cut(whole.shape, 0, [(2, 4), (8, 10)])
    assert box.local_shape == (4, 4)
    assert not box.is_all
    assert torch.equal(box.of(whole), torch.cat([whole[2:4], whole[8:10]]))


def test_a_box_along_another_dim_is_contiguous():
    whole = torch.arange(48.0).view(12, 4)
    part = Box.cut(whole.shape, 1, [(2, 4)]).of(whole)
    assert part.is_contiguous()
    assert torch.equal(part, whole[:, 2:4])


@pytest.mark.parametrize("shape", [(), (5,), (3, 4)])
def test_all_of_a_parameter_is_a_box_too(shape):
    whole = torch.randn(shape)
    box = Box.all_of(shape)
    assert box.is_all
    assert box.local_shape == shape
    assert torch.equal(box.of(whole), whole)


def test_a_model_of_whole_sequences_is_refused_where_ranks_share_them():
    def body(rank):
        model = torch.nn.Linear(4, 4)
        tz.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero2", mesh=tz.mesh(cp=2))

    with pytest.raises(tz.BadInput, match=r"The mesh has cp 2, .* tz.parallelize was not given this model"):
        run_in_threads(2, body)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"pipeline": tz.Pipeline(chunks=2)}, "given pipeline=Pipeline.*or leave 'pipeline' out"),
        ({"context": "rign"}, "'rign' is no context mode. Did you mean 'ring'"),
        ({"context": ""}, "'' is no context mode"),
        ({"balance": "x"}, "'x' is no context balance"),
        ({"tensor": {"0": "colwise"}}, "or leave 'tensor' out"),
    ],
)
def test_arguments_are_checked_where_the_mesh_needs_none(given, match):
    def body(rank):
        model = torch.nn.Linear(4, 4)
        assert tz.parallelize(model, tz.mesh(device="cpu"), context=None) is model
        with pytest.raises(tz.BadInput, match=match):
            tz.parallelize(model, tz.mesh(device="cpu"), **given)

    run_in_threads(1, body)
