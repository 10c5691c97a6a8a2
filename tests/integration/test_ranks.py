"""What several ranks do together when one of them cannot."""

import json
from functools import partial
from pathlib import Path

from growth_service.errors import UserError
from growth_service.training.ranks import Ranks
from tests.torch_helpers import run_on_ranks


def _map_with_a_fault(rank: int, *, folder: str) -> None:
    ranks = Ranks()

    def work(item: int) -> int:
        if item == 1:  # worked on by rank 1 alone
            raise UserError("item 1 is wrong")
        return item

    try:
        said = str(ranks.map(work, range(4)))
    except UserError as error:
        said = str(error)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps([said, ranks.map(abs, [-1, -2, -3])]))


def test_an_error_on_one_rank_is_an_error_on_all_and_leaves_them_in_step(tmp_path):
    run_on_ranks(partial(_map_with_a_fault, folder=str(tmp_path)), world_size=2, tmp_path=tmp_path)
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert seen == [["item 1 is wrong", [1, 2, 3]]] * 2
