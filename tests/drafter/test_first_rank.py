"""All ranks begin with the drafter of the first one."""

from pathlib import Path

import pytest
import torch
from tests.rank_tools import run_ranks

from tlt_trl.drafter.configuration_drafter import default_aux_layer_ids
from tlt_trl.drafter.ranks import DraftersDifferError, check_identical


SCRIPT = Path(__file__).with_name("start_script.py")


class TestComparison:
    @staticmethod
    def sums(drafter):
        """What a rank with this drafter sends."""
        sent = []
        check_identical(drafter, lambda own: (sent.append(own), own)[1])
        return sent[0]

    def compare(self, *drafters):
        check_identical(drafters[0], lambda own: torch.cat([self.sums(drafter) for drafter in drafters]))

    def test_equal_drafters_pass(self, make_drafter):
        self.compare(*[make_drafter() for _ in range(4)])

    def test_one_bit_is_enough(self, make_drafter):
        drafters = [make_drafter() for _ in range(3)]
        bits = drafters[2].fc.weight.data.view(torch.int32)
        bits[3, 4] ^= 1
        with pytest.raises(DraftersDifferError, match=r"ranks \[2\] are not that of rank 0: their weights differ"):
            self.compare(*drafters)

    def test_vocabularies_with_the_same_sum_differ(self, make_drafter):
        # Swapping two tokens for their neighbours on either side leaves every sum as it is.
        first, second = make_drafter(torch.tensor([2, 5, 6, 9])), make_drafter(torch.tensor([2, 4, 7, 9]))
        second.load_state_dict(first.state_dict() | {"d2t": second.d2t, "t2d": second.t2d})
        assert first.d2t.sum() == second.d2t.sum()
        with pytest.raises(DraftersDifferError, match=r"ranks \[1\] .* their draft vocabulary differ"):
            self.compare(first, second)

    def test_feature_layers_differ(self, make_drafter):
        first, second = make_drafter(), make_drafter()
        second.config.eagle_aux_hidden_state_layer_ids = [0, 1, 2]
        with pytest.raises(DraftersDifferError, match=r"ranks \[1\] .* their feature layers differ"):
            self.compare(first, second)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"zeros": True}, "weights"),
        ({"words": "20 20 21 22 23"}, "draft vocabulary"),
        ({"layers": [1, 3, 6]}, "feature layers"),
    ],
    ids=["a policy of zeros", "other data", "other layers"],
)
def test_ranks_begin_with_the_drafter_of_the_first_one(tmp_path, other, what):
    first_layers = {"layers": [2, 4, 5]} if "layers" in other else {}
    results, codes = run_ranks(SCRIPT, tmp_path, 2, rank_0=first_layers, rank_1=other)
    assert codes == [0, 0], results
    for result in results:
        assert "ranks [1]" in result["apart"] and what in result["apart"]
        assert result["together"] == ""
        assert result["layers"] == default_aux_layer_ids(8)
        assert result["random_state_is_kept"]
        # One rank writes for the engines of both, and both can read it.
        assert len(result["folders"]) == 1 and result["loads"]
    first, second = (torch.load(tmp_path / f"drafter_{rank}.pt") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["lm_head.weight"].any()
    # A failure of one rank ends both, and both say why.
    assert [result["failure"] for result in results] == [
        "OtherRankFailedError: All ranks end because some cannot go on:\nRank 1: ValueError: no room",
        "ValueError: no room",
    ]
