"""Plans that a backend refuses before it touches a row."""

import pytest

from headlong.engine.request import RowPlan
from headlong.errors import Fault


@pytest.mark.parametrize("bench", ["dense-native-1"], indirect=True)
@pytest.mark.parametrize("drafts", [(5, 128), (-1,), (2**70,)], ids=repr)
def test_given_drafts_are_tokens_of_the_model(bench, drafts):
    with pytest.raises(Fault, match=r"row 0 is given drafts .*; tokens are 0 to 127\."):
        bench.open(rows=1).round([RowPlan(0, len(drafts), 0, drafts=drafts)])


@pytest.mark.parametrize("bench", ["dense-native-1"], indirect=True)
@pytest.mark.parametrize("drafts", [None, (5,)], ids=repr)
def test_a_row_verifies_drafts_that_it_has(bench, drafts):
    with pytest.raises(Fault, match="row 0 is to verify 2 drafts but has"):
        bench.open(rows=1).round([RowPlan(0, 2, 0, drafts=drafts)])
