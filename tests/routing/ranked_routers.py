"""Routers for several processes: python -m torch.distributed.run ... -m routing.check ranked_routers.py:right"""

import torch.distributed
from checked_models import plain


def right(seed=0):
    return plain()(seed + 100 * torch.distributed.get_rank())


def same(seed=0):
    return plain()(seed)
