"""PPO on CartPole with torchrl's MultiSyncCollector, written as for torchrl; one import is changed.

    python examples/classic_collector.py

Only the scheme comes from aiosync.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.modules import OneHotCategorical, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from aiosync.sync import SharedMemWeightSyncScheme  # was: from torchrl.weight_update import ...


def make_env() -> Any:
    """Return CartPole, with the episode's return so far in each step."""
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(RewardSum(), StepCounter()))


def make_policy() -> Any:
    """Return a small network with a distribution over the two actions."""
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=OneHotCategorical,
            return_log_prob=True,
        ),
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=40, help="batches to collect and learn from")
    parser.add_argument("--frames", type=int, default=1000, help="frames per batch")
    options = parser.parse_args()
    torch.manual_seed(0)
    policy = make_policy()
    critic = ValueOperator(
        nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)), in_keys=["observation"]
    )
    loss = ClipPPOLoss(policy, critic, entropy_coeff=0.01, critic_coeff=0.5)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    collector = MultiSyncCollector(
        [make_env] * 2,
        policy,
        frames_per_batch=options.frames,
        total_frames=options.frames * options.updates,
        cat_results="stack",
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    )
    for update, batch in enumerate(collector, start=1):
        for _ in range(8):
            with torch.no_grad():
                advantage(batch)
            frames = batch.reshape(-1)
            for part in frames[torch.randperm(len(frames))].split(250):
                losses = loss(part)
                optimizer.zero_grad()
                sum(losses[name] for name in losses.keys() if name.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
        collector.update_policy_weights_()
        ended = batch["next", "done"].squeeze(-1)
        if ended.any() and update % 5 == 0:
            returns = batch["next", "episode_reward"].squeeze(-1)[ended]
            print(f"update {update}: mean return {returns.mean().item():.0f} over {len(returns)} episodes")
    collector.shutdown()


if __name__ == "__main__":
    main()
