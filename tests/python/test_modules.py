"""A module means its state_dict(keep_vars=True)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastsync
from support.markers import each_transport
from support.ranks import Rank, raises, spmd
from support.syncing import exchange, session
from support.tensors import assert_same, bytes_of, clone_exact


class Net(nn.Module):
    """Buffers of every kind, tied weights, a container."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("kept", torch.full((3,), fill))
        self.register_buffer("scratch", torch.full((3,), fill), persistent=False)
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(fill)


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: clone_exact(tensor) for name, tensor in module.state_dict().items()}


@each_transport
@spmd(2)
def test_module_to_module_sends_parameters_persistent_buffers_and_tied_names(rank: Rank, transport: str) -> None:
    net = Net(5.0 if rank.index == 0 else -1.0)
    expected = state(Net(5.0))
    assert {"emb.weight", "head.weight", "norm.running_mean", "norm.num_batches_tracked", "kept"} <= set(expected)
    with session(transport=transport, bucket_bytes=256) as sync:
        for step in range(3):
            if rank.index == 0:
                with torch.no_grad():
                    net.emb.weight.add_(step)
                report = sync.broadcast(net)
            else:
                report = sync.receive(into=net)
            expected["emb.weight"] = expected["head.weight"] = expected["emb.weight"] + step
            assert_same(state(net), expected)
            assert report.tensors == len(expected)
    assert net.scratch[0] == (5.0 if rank.index == 0 else -1.0), "a non-persistent buffer does not travel"
    assert net.head.weight is net.emb.weight
    assert net.norm.num_batches_tracked.shape == () and int(net.norm.num_batches_tracked) == 5


@spmd(2)
def test_one_liner_takes_modules(rank: Rank) -> None:
    net = Net(2.0 if rank.index == 0 else 0.0)
    fastsync.broadcast_bucketed(net, timeout_s=20)
    assert_same(state(net), state(Net(2.0)))
    assert all(parameter.requires_grad for parameter in net.parameters())


@spmd(2)
def test_module_and_state_dict_and_named_list_mix(rank: Rank) -> None:
    net = Net(3.0 if rank.index == 0 else 0.0)
    with session() as sync:
        sync.broadcast(net) if rank.index == 0 else sync.receive(into=list(net.state_dict().items()))
        assert_same(state(net), state(Net(3.0)))
    got = Net(0.0)
    with session() as sync:
        sync.broadcast(net.state_dict()) if rank.index == 0 else sync.receive(into=got)
    if rank.index == 1:
        assert_same(state(got), state(Net(3.0)))


@spmd(2)
def test_loader_of_another_module_may_be_fed(rank: Rank) -> None:
    net, own = Net(4.0), Net(0.0)

    def load(batch: list[tuple[str, torch.Tensor]]) -> None:
        own.load_state_dict(dict(batch), strict=False)

    with session(bucket_bytes=256) as sync:
        sync.broadcast(net) if rank.index == 0 else sync.receive(load=load)
    if rank.index == 1:
        assert_same(state(own), state(Net(4.0)))


@spmd(2)
def test_module_with_meta_parameters_is_refused_on_either_side(rank: Rank) -> None:
    with torch.device("meta"):
        ghost = nn.Linear(3, 3)
    real = nn.Linear(3, 3)
    with session() as sync:
        kind = "InvalidArgument" if rank.index == 0 else "ManifestMismatch"
        with raises(kind, mentions=["weight"]):
            sync.broadcast(ghost) if rank.index == 0 else sync.receive(into=real)
        kind = "ManifestMismatch" if rank.index == 0 else "InvalidArgument"
        with raises(kind, mentions=["weight", "meta"]):
            sync.broadcast(real) if rank.index == 0 else sync.receive(into=ghost)


class WithExtraState(nn.Module):
    """state_dict() holds something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> dict[str, int]:
        return {"step": 3}

    def set_extra_state(self, value: object) -> None:
        pass


@spmd(2)
def test_extra_state_that_is_no_tensor_is_refused_by_name(rank: Rank) -> None:
    net = WithExtraState()
    with session() as sync, raises("InvalidArgument", "ManifestMismatch", mentions=["_extra_state"]):
        sync.broadcast(net) if rank.index == 0 else sync.receive(into={"w": torch.zeros(2)})


@spmd(2)
def test_optimizer_step_between_syncs_is_seen(rank: Rank) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with session() as sync:
        for _ in range(4):
            if rank.index == 0:
                net(torch.randn(5, 8)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                sync.broadcast(net)
            else:
                sync.receive(into=net)
            mine, theirs = rank.share({name: bytes_of(value) for name, value in net.state_dict().items()})
            assert mine == theirs


@pytest.mark.parametrize("module", [nn.Identity, nn.Sequential])
@spmd(2)
def test_module_without_state_syncs_nothing(rank: Rank, module: type[nn.Module]) -> None:
    net = module()
    report = exchange(rank, net, {}, into={})
    assert report.tensors == 0 and report.nbytes == 0 and report.version == 1
